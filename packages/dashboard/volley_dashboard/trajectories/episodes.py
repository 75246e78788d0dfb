"""Archived episodes, token by token, as the trajectory viewer shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import ConfigError, DecodeError, NotFound, VolleyError
from shared.run import archive
from shared.run.folder import RunFolder
from shared.run.token_values import OfEpisodes, TokenValues
from shared.sequences import EpisodeSequence
from shared.types import Group, Trajectory, WeightVersion

if TYPE_CHECKING:
    from shared.models.chat import ChatTokenizer

_MOST_TOKENIZERS, _ANSWER_TOKENS = 4, 48
_ARRAYS = ("token_ids", "loss_mask", "logprobs")


def read_group(folder: RunFolder, run: str, version: WeightVersion, ticket: int) -> Group:
    """Read the group of a ticket from the step that made `version`. Raises NotFound, DecodeError."""
    for group in read_groups(folder, run, version, {ticket}):
        return group
    raise NotFound(f"{version} was not trained on ticket {ticket}", "the ledger names the step of each ticket")


def read_groups(folder: RunFolder, run: str, version: WeightVersion, tickets: Collection[int]) -> Iterator[Group]:
    """Yield the groups of tickets from the step that made `version`, in training order. Raises DecodeError."""
    groups = (Group.decode(payload) for payload in archive.read(folder.archive, run, version))
    return (group for group in groups if group.ticket in tickets)


def shown(
    group: Group, version: WeightVersion, tokenizer: ChatTokenizer | None, values: OfEpisodes | None = None
) -> dict[str, Any]:
    """Return a group as JSON. Without a tokenizer, tokens are shown by their ids.

    Args:
        values: the trainer's values of the tokens, where they are known.
    """
    known = values or {}
    return {
        "ticket": group.ticket,
        "env": group.env,
        "task": group.task,
        "version": str(version),
        "step": version.step,
        "trajectories": [
            _trajectory(one, tokenizer, known.get((one.ticket, one.sample_index))) for one in group.trajectories
        ],
    }


def _trajectory(one: Trajectory, tokenizer: ChatTokenizer | None, values: TokenValues | None) -> dict[str, Any]:
    if values is not None and len(values.logprobs) != one.n_stored:
        raise DecodeError(f"values of ticket {one.ticket} are not those of its tokens", "remove the folder `tokens`")
    ends = np.cumsum(one.own_lengths())
    own = [(end - n, end) for n, end in zip(one.own_lengths(), ends.tolist(), strict=True)]
    return {
        "sample": one.sample_index,
        "attempt": one.attempt,
        "reward": one.reward,
        "components": dict(one.reward_components),
        "success": one.success,
        "status": one.status,
        "end": one.end,
        "faults": dict(one.faults),
        "failures": dict(one.failures),
        "timings": dict(one.timings),
        "prompt_len": one.prompt_len,
        "teacher_lacks": [] if one.teacher_view is None else list(one.teacher_view.lacks),
        "sequences": [
            _sequence(sequence, tokenizer) | _trained(sequence, values, own[i]) | _taught(one, i, tokenizer)
            for i, sequence in enumerate(one.sequences())
        ],
    }


def _trained(one: EpisodeSequence, values: TokenValues | None, own: tuple[int, int]) -> dict[str, Any]:
    """Return the trainer's values of a sequence, 0 at tokens that it shares or that were not sampled."""
    if values is None:
        return {}
    sampled = one.loss_mask.astype(bool)

    def whole(stored: np.ndarray) -> np.ndarray:
        return np.where(sampled, np.concatenate([np.zeros(one.shared, np.float32), stored[slice(*own)]]), 0.0)

    trainer, advantages = whole(values.logprobs), whole(values.advantages)
    ratio = np.exp(np.clip(trainer - one.logprobs, -20.0, 20.0))
    named = {"trainer": trainer, "ratio": np.where(sampled, ratio, 1.0), "advantage": advantages}
    if values.marks is not None and values.weights is not None:
        named |= {"marks": whole(values.marks).astype(int), "weight": whole(values.weights)}
    return {name: [round(value, 5) for value in array.tolist()] for name, array in named.items()}


def _taught(one: Trajectory, number: int, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    """Return the prompt that a privileged teacher was shown of a sequence, if it was shown one."""
    if one.teacher_view is None or not one.teacher_view.prompts:
        return {}
    prompt = one.teacher_view.prompts[number]
    return {"teacher_prompt": {"text": "".join(texts(prompt.token_ids.tolist(), tokenizer)), "version": prompt.version}}


def _sequence(one: EpisodeSequence, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    ids = one.token_ids.tolist()
    return {
        "parent": one.parent,
        "shared": one.shared,
        "ids": ids,
        "texts": texts(ids, tokenizer),
        "mask": one.loss_mask.tolist(),
        "logprobs": [round(value, 5) for value in one.logprobs.tolist()],
        "teacher": None if one.teacher_logprobs is None else [round(v, 5) for v in one.teacher_logprobs.tolist()],
        "versions": [span.to_wire() for span in one.versions],
        "turns": [[turn.start, turn.end, turn.role, turn.reward] for turn in one.turns],
    }


def texts(ids: Sequence[int], tokenizer: ChatTokenizer | None) -> list[str]:
    """Return the text that each token adds; empty for a token that only begins a character."""
    if tokenizer is None:
        return [f"{one} " for one in ids]
    from shared.models.token_decoder import TokenDecoder

    decoder = TokenDecoder(tokenizer, skip_special=False)
    return [decoder.add([one]) for one in ids]


def tokenizer_of(folder: RunFolder) -> ChatTokenizer | None:
    """Return the tokenizer of a run's model; None if the model's folder is gone, or cannot be trusted."""
    path: Path | None = None
    with suppress(VolleyError, ModuleNotFoundError):  # the client alone may lack the libraries of tokenizers
        from shared.models import chat  # noqa: F401
        from shared.models.hub import model_folder
        from volley.runs.record import stored

        path = model_folder(stored(folder.path)[0].config.model.path, folder.path)
    return None if path is None else _tokenizer(path)


@lru_cache(maxsize=_MOST_TOKENIZERS)
def _tokenizer(path: Path) -> ChatTokenizer | None:
    from shared.models.chat import ChatTokenizer

    try:
        return ChatTokenizer(path, needs_template=False)
    except ConfigError:
        return None


def record_of(
    one: Trajectory, version: WeightVersion, tokenizer: ChatTokenizer | None, *, tokens: bool = False
) -> dict[str, Any]:
    """Describe an episode for an export: its fields, and its turns as text.

    Args:
        version: weights that the step made which trained on it.
        tokens: add `sequences`, each with `parent`, `shared` and arrays `token_ids`, `loss_mask`, `logprobs` [T].
    """
    sequences = one.sequences()
    turns = [
        {"role": turn.role, "text": text, "reward": turn.reward, "sequence": i}
        for i, sequence in enumerate(sequences)
        for turn, text in zip(sequence.turns, turn_texts(sequence, tokenizer), strict=True)
    ]
    record = {
        "ticket": one.ticket,
        "sample": one.sample_index,
        "attempt": one.attempt,
        "env": one.env,
        "task": one.task,
        "version": str(version),
        "step": version.step,
        "reward": one.reward,
        "success": one.success,
        "status": one.status,
        "end": one.end,
        "components": dict(one.reward_components),
        "faults": dict(one.faults),
        "failures": dict(one.failures),
        "turns": turns,
    }
    if tokens:
        record["sequences"] = [
            {"parent": s.parent, "shared": s.shared} | {name: getattr(s, name) for name in _ARRAYS} for s in sequences
        ]
    return record


def answer_of(one: Trajectory, tokenizer: ChatTokenizer | None) -> str:
    """Return the text of the first tokens of an episode's last answer."""
    sequence = one.sequences()[-1]
    answer = next((turn for turn in reversed(sequence.turns) if turn.role == "assistant"), None)
    if answer is None:
        return ""
    ids = sequence.token_ids[answer.start : min(answer.end, answer.start + _ANSWER_TOKENS)].tolist()
    return "".join(texts(ids, tokenizer)).strip() + ("…" if answer.end - answer.start > _ANSWER_TOKENS else "")


def turn_texts(one: EpisodeSequence, tokenizer: ChatTokenizer | None) -> list[str]:
    """Return the text of each turn of a sequence. Without a tokenizer, tokens are shown by their ids."""
    ids, done, found = one.token_ids.tolist(), 0, list[str]()
    if tokenizer is None:
        return [" ".join(map(str, ids[turn.start : turn.end])) for turn in one.turns]
    from shared.models.token_decoder import TokenDecoder

    decoder = TokenDecoder(tokenizer, skip_special=False)
    for turn in one.turns:
        decoder.add(ids[done : turn.start])
        found.append(decoder.add(ids[max(done, turn.start) : turn.end]))
        done = max(done, turn.end)
    return found
