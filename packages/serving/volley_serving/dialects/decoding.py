"""Decode the tokens of an answer, whole or as they are sampled, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from shared.models.chat import ChatTokenizer
from shared.models.token_decoder import TokenDecoder, held_back
from volley_serving.dialects.reading import AnswerReader
from volley_serving.dialects.records import (
    AnswerContent,
    Answered,
    Asked,
    Call,
    FinishReason,
    Piece,
    Reasoning,
    Sampled,
)


class AnswerDecoder:
    """Decode one answer as its tokens arrive, and end it at a stop string, or after a call if there may be only one.

    Args:
        opened: see `AnswerReader`.

    Attributes:
        stopped: the answer has ended; no more tokens are needed.
        may_stop: the answer may end before the engine ends it.
        n_tokens: number of its tokens so far.
    """

    def __init__(self, tokenizer: ChatTokenizer, asked: Asked, opened: str = "") -> None:
        self._tokenizer = tokenizer
        self._tokens = TokenDecoder(tokenizer, skip_special=_skips_special(asked))
        tools = asked.tools if asked.reads_calls else ()
        self._reader = AnswerReader(tools, opened, reasoning=not asked.prompts)
        self._stops = [stop for stop in asked.sampling.stop if stop]
        self._one_call = bool(tools) and (not asked.parallel_calls or asked.tool_name is not None)
        self._ends = tokenizer.end_ids | set(asked.sampling.stop_token_ids)
        self._waiting = list[int]()  # an end token, which is no text if it is the last one
        self._held = ""  # may be the beginning of a stop string
        self._pieces = list[Piece]()
        self._stop: str | None = None
        self.stopped, self.may_stop = False, bool(self._stops) or self._one_call
        self.n_tokens = 0

    def add(self, ids: Sequence[int]) -> list[Piece]:
        """Return the pieces that the tokens complete."""
        found = list[Piece]()
        for part in ([token] for token in ids) if self.may_stop else [ids]:
            if self.stopped:
                break
            self.n_tokens += len(part)
            part = [*self._waiting, *part]
            n = len(part) - (part[-1:] != [] and part[-1] in self._ends)
            self._waiting = part[n:]
            found += self._read(self._tokens.add(part[:n]))
        self._pieces += found
        return found

    def end(self, sampled: Sampled) -> tuple[list[Piece], Answered]:
        """Return the last pieces, and the answer.

        Args:
            sampled: all tokens, which have been added; those after a stop string are cut.
        """
        found = list[Piece]()
        if not self.stopped:
            ended = self._tokenizer.is_ended(ids := sampled.ids.tolist()) or ids[-1:] == [sampled.matched]
            found += self._read(self._tokens.add([] if ended else self._waiting, last=True), last=True)
        found += self._reader.end()
        self._pieces += found
        calls = tuple(piece for piece in self._pieces if isinstance(piece, Call))
        reason: FinishReason = "stop" if self.stopped else sampled.finish
        answer = Answered(
            sampled.first(self.n_tokens) if self.stopped else sampled,
            "".join(piece.text for piece in self._pieces if isinstance(piece, AnswerContent)),
            "".join(piece.text for piece in self._pieces if isinstance(piece, Reasoning)),
            calls,
            "tool_calls" if calls and reason == "stop" else reason,
            self._stop,
        )
        return found, answer

    def _read(self, text: str, *, last: bool = False) -> list[Piece]:
        text, self._held = self._held + text, ""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self._stop = min(found)
            self.stopped = True
            return self._reader.add(text[:at])
        n = len(text) - (0 if last else held_back(text, self._stops))
        self._held = text[n:]
        pieces = self._reader.add(text[:n])
        if self._one_call and self._reader.n_calls:
            self.stopped = True
            return pieces[: next(i for i, piece in enumerate(pieces) if isinstance(piece, Call)) + 1]
        return pieces


def answered(tokenizer: ChatTokenizer, asked: Asked, sampled: Sampled, opened: str = "") -> Answered:
    """Read a finished answer."""
    decoder = AnswerDecoder(tokenizer, asked, opened)
    decoder.add(sampled.ids.tolist())
    return decoder.end(sampled)[1]


def _skips_special(asked: Asked) -> bool:
    """Return whether special tokens are left out of the text; never where calls, which they may mark, are read."""
    return asked.sampling.skip_special_tokens and not asked.reads_calls
