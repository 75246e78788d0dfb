"""Text of an answer while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from shared.models.chat import ChatTokenizer

_UNFINISHED = "\ufffd"
_MOST_WAITS = 64  # calls that a character may wait for its last byte


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
        self._waits = 0  # calls since the last end of a character

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that the tokens add. `last`: no more tokens will come."""
        if not ids and not last:
            return ""
        self._ids += ids
        self._waits += 1
        text = self._decode(self._ids)
        whole = text if last or self._waits > _MOST_WAITS else text.rstrip(_UNFINISHED)
        new, self._given = whole[self._given :], max(self._given, len(whole))
        if len(whole) == len(text):
            self._ids = self._ids[self._whole :]
            self._whole, self._given, self._waits = len(self._ids), len(self._decode(self._ids)), 0
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip)


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
