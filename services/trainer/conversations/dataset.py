"""Conversations as tokens: which of them fit, which are held out, and in which order they are passed over.

Invariants: a conversation becomes the very tokens that a rollout of it would record, end-of-turn tokens included; which
examples step s trains on follows from the seed and s alone, so a checkpoint's step is its place in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import blake3
import numpy as np

from services.trainer.conversations.flags import is_row_learned
from services.trainer.conversations.formats import Conversation, conversation, preference_pair, unread
from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer

type TooLong = Literal["error", "drop", "truncate"]
type Kind = Literal["conversations", "pairs"]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """ids int32 [T]; mask uint8 [T], 1 on the tokens to learn."""

    ids: np.ndarray
    mask: np.ndarray

    @property
    def n_learned(self) -> int:
        """Tokens to learn that something stands before."""
        return int(self.mask[1:].sum())


type Example = tuple[TokenSequence, ...]
"""One sequence; of a preference pair the chosen one and the rejected one."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """`examples` that are used; how many others were too long and dropped, and how many of these were truncated; how
    many pairs were dropped because both answers are the same tokens, of how many examples the chat template leaves out
    the tools, and in how many an answer began with the prompt, which was taken out there, or kept in text that may
    quote it; how many rows have a flag that says not to learn them. `unused` are the names of columns that nothing
    reads.
    """

    examples: Sequence[Example]
    n_dropped: int = 0
    n_truncated: int = 0
    n_identical: int = 0
    n_without_tools: int = 0
    n_prompt_repeated: int = 0
    n_prompt_kept: int = 0
    n_not_learned: int = 0
    unused: Sequence[str] = ()

    def told(self) -> dict[str, int]:
        """How many of what."""
        tokens = sum(one.n_learned for example in self.examples for one in example)
        counts = {"examples": len(self.examples), "learned_tokens": tokens}
        return counts | self.told_of_others()

    def told_of_others(self) -> dict[str, int]:
        """How many are not there as they were given."""
        counts = {"dropped": self.n_dropped, "truncated": self.n_truncated}
        counts |= {"identical": self.n_identical, "without_tools": self.n_without_tools}
        counts |= {"prompt_repeated": self.n_prompt_repeated, "prompt_kept": self.n_prompt_kept}
        return counts | {"not_learned": self.n_not_learned}


def tokenized(
    tokenizer: ChatTokenizer, records: Iterable[tuple[str, Any]], kind: Kind, longest: int, too_long: TooLong
) -> Dataset:
    """Of (place, record) all that fit into `longest` tokens, or are made to fit: `truncate` keeps the beginning.

    Raises ConfigError naming the place: a record that cannot be read, one that is too long where that is an error; and
    if none is left.
    """
    examples, n, unused = list[Example](), Counter[str](), dict[str, None]()
    for place, record in records:
        unused |= dict.fromkeys(unread(record))
        example, noted = _rendered(tokenizer, record, kind, place)
        if not example:
            n["not_learned"] += 1
            continue
        length = max(len(one.ids) for one in example)
        if length > longest:
            if too_long == "error":
                raise ConfigError(f"{place} has {length} tokens, more than {longest}", _LONGER)
            example = tuple(TokenSequence(one.ids[:longest], one.mask[:longest]) for one in example)
            if too_long == "drop" or not all(one.n_learned for one in example):
                n["dropped"] += 1
                continue
        if kind == "pairs" and np.array_equal(example[0].ids, example[1].ids):
            n["identical"] += 1
            continue
        n["truncated"] += length > longest
        n.update(noted)
        examples.append(example)
    if not examples and n["identical"]:
        n_pairs, n_dropped, n_identical = n["dropped"] + n["identical"], n["dropped"], n["identical"]
        told = f"of {n_pairs} pairs {n_dropped} are too long, and {n_identical} have one answer twice"
        hint = "chosen and rejected have to differ within the length that is trained on"
        raise ConfigError(f"{told}, in tokens as they are trained on", hint)
    if not examples and n["not_learned"] and not n["dropped"]:
        raise ConfigError("every row has a flag that says not to learn it", "drop or rename the column of the flag")
    if not examples:
        raise ConfigError(f"none of {n['dropped']} conversations fits into {longest} tokens", _LONGER)
    names = ("dropped", "truncated", "identical", "without_tools", "prompt_repeated", "prompt_kept", "not_learned")
    return Dataset(examples, *(n[name] for name in names), unused=[*unused])


_LONGER = "raise trainer.length_buckets, or choose another sft.too_long"


def _rendered(tokenizer: ChatTokenizer, record: Any, kind: Kind, place: str) -> tuple[Example, list[str]]:
    """And what has to be counted: whether the chat template leaves out its tools, and an answer repeats the prompt. The
    example is empty if the row is not to be learned.
    """
    try:
        if not is_row_learned(record):
            return (), []
        if kind == "conversations":
            found = (conversation(record),)
        else:
            pair = preference_pair(record)
            found = (pair.chosen, pair.rejected)
        example = tuple(_sequence(tokenizer, one) for one in found)
        noted = {
            "without_tools": _variant(tokenizer, found[0]).leaves_out(found[0].messages, found[0].tools),
            "prompt_repeated": found[0].repeats_prompt,
            "prompt_kept": found[0].keeps_prompt,
        }
        return example, [name for name, is_so in noted.items() if is_so]
    except InputError as error:
        raise ConfigError(f"{place}: {error.detail}", error.hint) from error


def _sequence(tokenizer: ChatTokenizer, given: Conversation) -> TokenSequence:
    ids, mask = _variant(tokenizer, given).render_demonstration(given.messages, given.tools, given.learned)
    return TokenSequence(np.asarray(ids, np.int32), np.asarray(mask, np.uint8))


def _variant(tokenizer: ChatTokenizer, given: Conversation) -> ChatTokenizer:
    return tokenizer.with_variables(given.variables) if given.variables else tokenizer


def split(examples: Sequence[Example], held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Those to train on, and the share that is held out: one at least, chosen by the seed. Raises ConfigError if none
    is left to train on.
    """
    if not held_out:
        return list(examples), []
    n = max(1, round(held_out * len(examples)))
    if n >= len(examples):
        raise ConfigError(f"sft.eval_fraction={held_out:g} of {len(examples)} examples leaves none to train on")
    chosen = set(np.random.default_rng([seed, 0xE7A1]).permutation(len(examples))[:n].tolist())
    kept = [example for i, example in enumerate(examples) if i not in chosen]
    return kept, [examples[i] for i in sorted(chosen)]


def digest(parts: Iterable[Sequence[Example]]) -> str:
    """blake3 over all tokens and masks, in hex: what a resumed run must find again."""
    found = blake3.blake3()
    for examples in parts:
        found.update(len(examples).to_bytes(8, "little"))
        for one in (sequence for example in examples for sequence in example):
            found.update(len(one.ids).to_bytes(8, "little") + one.ids.tobytes() + one.mask.tobytes())
    return found.hexdigest()


def n_steps(max_steps: int, epochs: int | None, n_examples: int, batch_size: int) -> int:
    """`max_steps` if they are given, else enough for so many epochs, one by default; the last batch goes on into the
    next.
    """
    return max_steps or -(-(epochs or 1) * n_examples // batch_size)


def batches(n_examples: int, batch_size: int, seed: int, after: int = 0) -> Iterator[np.ndarray]:
    """Of each step after step `after` the indices of its examples, int64 [batch_size]; without end. Every epoch has an
    order of its own, and a batch goes on into the next one.
    """
    return islice(_from_the_start(n_examples, batch_size, seed), after, None)


def _from_the_start(n_examples: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng([seed, 0xB47C4])
    pool = np.zeros(0, np.int64)
    while True:
        while len(pool) < batch_size:
            pool = np.concatenate([pool, rng.permutation(n_examples)])
        yield pool[:batch_size]
        pool = pool[batch_size:]
