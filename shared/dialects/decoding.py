"""Decode the tokens of an answer, whole or as they are sampled, up to a stop string."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from shared.dialects.reading import AnswerReader, held_back
from shared.dialects.records import Answered, Asked, Call, Content, FinishReason, Piece, Reasoning, Sampled
from shared.models.chat import ChatTokenizer

_UNFINISHED = "\ufffd"
_WINDOW = 64  # tokens that may be decoded again


class TokenDecoder:
    """Decode tokens into text that only grows: a character is given once all of its bytes are there.

    Tokens are decoded after the ones before them, because a tokenizer may write a token differently at the beginning of
    a text.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids = list[int]()  # from the last end of a character but one
        self._whole = 0  # number of them up to the last end of a character
        self._given = 0  # characters of their text that were given

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that the tokens add. `last`: no more tokens will come."""
        self._ids += ids
        text = self._decode(self._ids)
        whole = text if last or len(self._ids) > _WINDOW else text.rstrip(_UNFINISHED)
        new, self._given = whole[self._given :], max(self._given, len(whole))
        if len(whole) == len(text):
            self._ids = self._ids[self._whole :]
            self._whole, self._given = len(self._ids), len(self._decode(self._ids))
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip)


class AnswerDecoder:
    """Decode one answer as its tokens arrive.

    Args:
        opened: see `AnswerReader`.

    Attributes:
        stopped: a stop string has appeared: no more tokens are needed.
    """

    def __init__(self, tokenizer: ChatTokenizer, asked: Asked, opened: str = "") -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._tokens = TokenDecoder(tokenizer, skip_special=skips_special(asked))
        self._reader = _reader(asked, opened)
        self._stops = [stop for stop in asked.sampling.stop if stop]
        self._ends = tokenizer.end_ids | set(asked.sampling.stop_token_ids)
        self._waiting = list[int]()  # an end token, which is no text if it is the last one
        self._held = ""
        self.stopped = False

    def add(self, ids: Sequence[int]) -> list[Piece]:
        """Return the pieces that the tokens complete."""
        if self.stopped:
            return []
        ids = [*self._waiting, *ids]
        n = len(ids) - (bool(ids) and ids[-1] in self._ends)
        self._waiting = ids[n:]
        return self._read(self._tokens.add(ids[:n]))

    def end(self, sampled: Sampled) -> list[Piece]:
        """Return the last pieces. Args: sampled: all tokens, of which the last ones may not have been added."""
        rest = [] if self.stopped or _is_ended(self._tokenizer, sampled) else self._waiting
        pieces = [] if self.stopped else self._read(self._tokens.add(rest, last=True), last=True)
        return [*pieces, *self._reader.end()]

    def _read(self, text: str, *, last: bool = False) -> list[Piece]:
        text, self._held = self._held + text, ""
        at = _first_stop(text, self._stops)
        if at is not None:
            self.stopped = True
            return self._reader.add(text[:at])
        n = len(text) - (0 if last else held_back(text, self._stops) if self._stops else 0)
        self._held = text[n:]
        return self._reader.add(text[:n])


def answered(tokenizer: ChatTokenizer, asked: Asked, sampled: Sampled, opened: str = "") -> Answered:
    """Read a finished answer. Its tokens are cut after the one that completes a stop string."""
    stops = [stop for stop in asked.sampling.stop if stop]
    sampled, text = _cut(tokenizer, asked, sampled, stops)
    at = _first_stop(text, stops)
    reader = _reader(asked, opened)
    pieces = [*reader.add(text[:at]), *reader.end()]
    calls = tuple(piece for piece in pieces if isinstance(piece, Call))
    reason: FinishReason = "stop" if at is not None else sampled.finish
    return Answered(
        sampled,
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        calls,
        "tool_calls" if calls and reason == "stop" else reason,
        None if at is None else next(stop for stop in stops if text.startswith(stop, at)),
    )


def skips_special(asked: Asked) -> bool:
    """Return whether special tokens are left out of the text; never where calls, which they may mark, are read."""
    return asked.sampling.skip_special_tokens and not asked.reads_calls


def _reader(asked: Asked, opened: str) -> AnswerReader:
    return AnswerReader(asked.tools if asked.reads_calls else (), opened, reasoning=not asked.prompts)


def _is_ended(tokenizer: ChatTokenizer, sampled: Sampled) -> bool:
    ids = sampled.ids.tolist()
    return bool(ids) and (tokenizer.is_ended(ids) or ids[-1] == sampled.matched)


def _cut(tokenizer: ChatTokenizer, asked: Asked, sampled: Sampled, stops: Sequence[str]) -> tuple[Sampled, str]:
    """Return the tokens up to the one that completes a stop string, and their text without the end of the answer."""
    ids = sampled.ids.tolist()
    ids = ids[: len(ids) - _is_ended(tokenizer, sampled)]

    def text(n: int) -> str:
        return tokenizer.decode(ids[:n], skip_special=skips_special(asked))

    if not stops or _first_stop(whole := text(len(ids)), stops) is None:
        return sampled, text(len(ids)) if not stops else whole
    n = bisect.bisect_left(range(len(ids)), True, key=lambda n: _first_stop(text(n), stops) is not None)
    return sampled.first(n), text(n)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
