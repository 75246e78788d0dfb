"""Texts of a group's episodes, decoded from the recorded tokens, as a judge reads them.

The texts depend on the group alone, so the same group is the same question. Special tokens are left out, and `<|` is
written `< |`: most servers read such texts in a message as special tokens, with which an answer could end the message
that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shared.models.chat import ChatTokenizer
from shared.text import well_formed
from shared.types import ASSISTANT, Group, Trajectory

OWN_TASK = "(each answer begins with its own task)"


@dataclass(frozen=True, slots=True)
class EpisodeText:
    """One episode: the text before its first answer, what followed, and the number of its answers."""

    task: str
    said: str
    n_turns: int


def texts_of(group: Group, tokenizer: ChatTokenizer, shows: Literal["answer", "conversation"]) -> list[EpisodeText]:
    """Return the texts of the episodes. Tasks that differ become part of the texts after them."""
    found = [_text(one, tokenizer, shows) for one in group.trajectories]
    if len({one.task for one in found}) == 1:
        return found
    return [EpisodeText(OWN_TASK, f"[task]\n{one.task}\n\n{one.said}", one.n_turns) for one in found]


def _text(trajectory: Trajectory, tokenizer: ChatTokenizer, shows: Literal["answer", "conversation"]) -> EpisodeText:
    turns = list(_turns(trajectory, tokenizer))
    answers = [text for role, text in turns if role == ASSISTANT]
    task = _read(tokenizer, trajectory.token_ids[: trajectory.prompt_len].tolist())
    if shows == "answer":
        return EpisodeText(task, answers[-1] if answers else "", len(answers))
    parts, number = list[str](), 0
    for role, text in turns:
        number += role == ASSISTANT
        parts.append(f"[{f'answer of turn {number}' if role == ASSISTANT else role}]\n{text}")
    return EpisodeText(task, "\n\n".join(parts), len(answers))


def _turns(trajectory: Trajectory, tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    """Yield role and text of the turns of all sequences after the first prompt, in the order of the record."""
    starts = [0, *(branch.shared for branch in trajectory.branches)]
    for sequence, start in zip((trajectory, *trajectory.branches), starts, strict=True):
        for turn in sequence.turns:
            if sequence is trajectory and turn.end <= trajectory.prompt_len:
                continue
            yield turn.role, _read(tokenizer, sequence.token_ids[turn.start - start : turn.end - start].tolist())


def _read(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return well_formed(tokenizer.decode(ids, skip_special=True)).replace("<|", "< |").strip()
