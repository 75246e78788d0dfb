"""Tokenized conversations: length limits, held-out split, and order of examples.

Invariants: a conversation becomes exactly the tokens that a rollout of it would record, end-of-turn tokens included;
the examples of step s depend only on the seed and s, so a checkpoint's step is its position in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import blake3
import numpy as np

from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer
from volley_serving.templates.prompts import leaves_out
from volley_supervised.conversations.flags import is_row_learned
from volley_supervised.conversations.formats import Conversation, conversation, preference_pair, unread
from volley_supervised.conversations.rendering import render_demonstration

type TooLong = Literal["error", "drop", "truncate"]
type Kind = Literal["conversations", "pairs"]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens of a conversation: ids int32 [T]; mask uint8 [T], 1 on the tokens to learn."""

    ids: np.ndarray
    mask: np.ndarray

    @property
    def n_learned(self) -> int:
        """Number of tokens to learn, without a first token, which nothing predicts."""
        return int(self.mask[1:].sum())


type Example = tuple[TokenSequence, ...]
"""One sequence, or the chosen and the rejected one of a preference pair."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples and counts of rows that were changed or dropped.

    `n_dropped` rows were too long, `n_truncated` examples were shortened, `n_identical` pairs were dropped because both
    answers have the same tokens. The chat template omits the tools of `n_without_tools` examples. Answers began with
    the prompt in `n_prompt_repeated` examples, where it was removed, and in `n_prompt_kept`, where it may be a quote.
    `n_not_learned` rows have a flag not to learn them. `unused` are names of columns that are not read.
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

    def counts(self) -> dict[str, int]:
        """Counts for the log."""
        tokens = sum(one.n_learned for example in self.examples for one in example)
        counts = {"examples": len(self.examples), "learned_tokens": tokens}
        return counts | self.counts_of_changed()

    def counts_of_changed(self) -> dict[str, int]:
        """Counts of rows that were changed or dropped."""
        counts = {"dropped": self.n_dropped, "truncated": self.n_truncated}
        counts |= {"identical": self.n_identical, "without_tools": self.n_without_tools}
        counts |= {"prompt_repeated": self.n_prompt_repeated, "prompt_kept": self.n_prompt_kept}
        return counts | {"not_learned": self.n_not_learned}


def tokenized(
    tokenizer: ChatTokenizer, records: Iterable[tuple[str, Any]], kind: Kind, longest: int, too_long: TooLong
) -> Dataset:
    """Tokenize records of (place, record) that fit into `longest` tokens; `truncate` keeps the beginning of others.

    Raises ConfigError, with the place, for a record that cannot be read, or is too long if `too_long` is `error`; and
    if no example is left.
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
        counted = f"of {n_pairs} pairs {n_dropped} are too long, and {n_identical} have one answer twice"
        hint = "give pairs whose chosen and rejected answers differ within the longest of trainer.length_buckets"
        raise ConfigError(f"{counted}, in tokens", hint)
    if not examples and n["not_learned"] and not n["dropped"]:
        raise ConfigError("every row has a flag that says not to learn it", "drop or rename the column of the flag")
    if not examples:
        raise ConfigError(f"none of {n['dropped']} conversations fits into {longest} tokens", _LONGER)
    names = ("dropped", "truncated", "identical", "without_tools", "prompt_repeated", "prompt_kept", "not_learned")
    return Dataset(examples, *(n[name] for name in names), unused=[*unused])


_LONGER = "raise trainer.length_buckets, or choose another sft.too_long"


def _rendered(tokenizer: ChatTokenizer, record: Any, kind: Kind, place: str) -> tuple[Example, list[str]]:
    """Tokenize a record; return the example and the names of the counts it adds to.

    The example is empty if a flag says not to learn the row.
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
            "without_tools": leaves_out(_variant(tokenizer, found[0]), found[0].messages, found[0].tools),
            "prompt_repeated": found[0].repeats_prompt,
            "prompt_kept": found[0].keeps_prompt,
        }
        return example, [name for name, is_so in noted.items() if is_so]
    except InputError as error:
        raise ConfigError(f"{place}: {error.detail}", error.hint) from error


def _sequence(tokenizer: ChatTokenizer, given: Conversation) -> TokenSequence:
    ids, mask = render_demonstration(_variant(tokenizer, given), given.messages, given.tools, given.learned)
    return TokenSequence(np.asarray(ids, np.int32), np.asarray(mask, np.uint8))


def _variant(tokenizer: ChatTokenizer, given: Conversation) -> ChatTokenizer:
    return tokenizer.with_variables(given.variables) if given.variables else tokenizer


def split(examples: Sequence[Example], held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split examples into those to train on and the held-out share, at least one, chosen by the seed.

    Raises ConfigError if none is left to train on.
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
    """Compute blake3 of all tokens and masks, in hex; it must be the same when a run resumes."""
    found = blake3.blake3()
    for examples in parts:
        found.update(len(examples).to_bytes(8, "little"))
        for one in (sequence for example in examples for sequence in example):
            found.update(len(one.ids).to_bytes(8, "little") + one.ids.tobytes() + one.mask.tobytes())
    return found.hexdigest()


def n_steps(max_steps: int, epochs: int | None, n_examples: int, batch_size: int) -> int:
    """Return `max_steps` if set, or else the steps of `epochs` (one by default).

    The last batch continues into the next epoch.
    """
    return max_steps or -(-(epochs or 1) * n_examples // batch_size)


def batches(n_examples: int, batch_size: int, seed: int, after: int = 0) -> Iterator[np.ndarray]:
    """Yield without end the indices of examples, int64 [batch_size], of each step after `after`.

    Every epoch has its own order, and a batch continues into the next epoch.
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
