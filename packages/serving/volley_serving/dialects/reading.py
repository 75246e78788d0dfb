"""Read an answer while its text arrives: reasoning, content and calls of tools.

The same reader reads a finished text, so a stream and a whole answer agree. Text that may be the beginning of a mark is
held back until the next text decides.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from shared.models.token_decoder import held_back
from volley_serving.dialects.calls import Schemas, text_calls
from volley_serving.dialects.records import AnswerContent, Call, Piece, Reasoning

THINK, END_THINK = "<think>", "</think>"
_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_MARKS = (_TAG, "[TOOL_CALLS]", "<|python_tag|>")


class AnswerReader:
    """Split the text of one answer into pieces.

    Args:
        tools: of the request; without any, calls are not looked for.
        opened: text before the sampled one that belongs to the answer: an opened <think>, or the beginning of a call.
        reasoning: False leaves reasoning in the content.
    """

    def __init__(self, tools: Schemas = (), opened: str = "", *, reasoning: bool = True) -> None:
        self._tools, self._held = tools, ""
        self._state = self._begin if reasoning else self._content
        self._blank = True  # no content yet
        self._searched = 0  # characters of a call in which its end is not
        self._pieces = list[Piece]()
        self.n_calls = 0
        self.add(opened)

    def add(self, text: str) -> list[Piece]:
        """Read more text; return the pieces that are certain."""
        self._held += text
        while self._held and self._state():
            pass
        return self._taken()

    def end(self) -> list[Piece]:
        """Return the last pieces, after all text."""
        held, self._held = self._held, ""
        if self._state == self._thinking:
            self._put(Reasoning(held.rstrip()))
        elif self._state == self._call:
            if not self._read_calls(held):
                self._put(AnswerContent(held))
        elif self._state != self._after_call:
            self._put(AnswerContent(held))
        return self._taken()

    def _begin(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._state = text[len(THINK) :], self._before_thoughts
            return True
        if THINK.startswith(text):
            return False
        self._state = self._content
        return True

    def _before_thoughts(self) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._thinking
        return bool(self._held)

    def _thinking(self) -> bool:
        text, found, after = self._held.partition(END_THINK)
        if found:
            self._put(Reasoning(text.rstrip()))
            self._held, self._state = after.lstrip("\n"), self._after_thoughts
            return True
        self._release(_kept(text, (END_THINK,)), Reasoning)
        return False

    def _after_thoughts(self) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._content
        return bool(self._held)

    def _content(self) -> bool:
        if not self._tools:
            self._release(len(self._held), AnswerContent)
            return False
        if self._blank and self._held.lstrip().startswith("{"):
            self._state, self._searched = self._call, 0
            return True
        at = min((at for mark in _MARKS if (at := self._held.find(mark)) >= 0), default=-1)
        if at < 0:
            self._release(_kept(self._held, _MARKS), AnswerContent)
            return False
        self._put(AnswerContent(self._held[:at].rstrip()))
        self._held, self._state, self._searched = self._held[at:], self._call, 0
        return True

    def _after_call(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._content
        return bool(self._held)

    def _call(self) -> bool:
        """Wait for the end of a call. Only a call between tags has an end before that of the text."""
        if not self._held.startswith(_TAG):
            return False
        at = self._held.find(_END_TAG, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(_END_TAG))
            return False
        end = at + len(_END_TAG)
        if self._read_calls(self._held[:end]):
            self._held, self._state = self._held[end:], self._after_call
        else:
            self._searched = end  # the tag may stand in the text of an argument
        return True

    def _read_calls(self, text: str) -> bool:
        """Add the calls of a text; False if there are none or one cannot be read."""
        found = text_calls(text, "auto", self._tools)
        if not found or any(call.problem for call in found):
            return False
        for call in found:
            self._pieces.append(Call(new_id(), call.name, json.dumps(call.arguments, ensure_ascii=False)))
        self.n_calls += len(found)
        return True

    def _release(self, n: int, kind: type[Reasoning | AnswerContent]) -> None:
        """Give away the first n held characters."""
        text, self._held = self._held[:n], self._held[n:]
        self._put(kind(text))

    def _put(self, piece: Reasoning | AnswerContent) -> None:
        if piece.text:
            self._pieces.append(piece)
            self._blank = self._blank and (isinstance(piece, Reasoning) or not piece.text.strip())

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def new_id() -> str:
    """Make the id of a call: nine letters and digits, which every chat template accepts, Mistral's too."""
    return uuid.uuid4().hex[:9]


def _kept(text: str, marks: Sequence[str]) -> int:
    """Return the length of the text that certainly stands before a mark and the blanks before it."""
    return len(text[: len(text) - held_back(text, marks)].rstrip())
