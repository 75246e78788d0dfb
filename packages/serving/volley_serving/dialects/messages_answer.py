"""Answers of Anthropic's Messages API, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import VolleyError
from shared.models.chat import ChatTokenizer
from volley_serving.dialects.errors import anthropic_error
from volley_serving.dialects.events import event
from volley_serving.dialects.records import AnswerContent, Answered, Asked, Call, Head, Piece, Reasoning, Sampled, Usage

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


def write(
    asked: Asked, head: Head, answers: Sequence[Answered], usage: Usage, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Write the only answer as the JSON of a `message`."""
    (answer,) = answers
    blocks = [_block(piece) for piece in answer.pieces or [AnswerContent("")]]
    return {**_message(head, usage), "content": blocks, **_stopped(answer)}


def _message(head: Head, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _stopped(answer: Answered) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop is not None and answer.finish_reason == "stop" else None
    reason = reason or _REASONS.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _block(piece: Piece) -> dict[str, Any]:
    match piece:
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case AnswerContent(text):
            return {"type": "text", "text": text}
        case Call():
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


class MessagesStream:
    """Encoder of the events of one message. See `AnswerStream`."""

    def __init__(self, asked: Asked, head: Head, tokenizer: ChatTokenizer) -> None:
        self._head = head
        self._n_blocks = 0  # begun
        self._open: type[Reasoning | AnswerContent] | None = None
        self._answer: Answered | None = None

    def begin(self, n_prompt: int = 0) -> bytes:
        return _event("message_start", message=_message(self._head, Usage(n_prompt, 0)))

    def add(self, i: int, pieces: Sequence[Piece], sampled: Sampled | None = None) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def finish(self, i: int, answer: Answered) -> bytes:
        self._answer = answer
        empty = b"" if self._n_blocks else self._begin_block(AnswerContent(""))
        return empty + self._end_block()

    def end(self, usage: Usage) -> bytes:
        assert self._answer is not None
        stopped = _event("message_delta", delta=_stopped(self._answer), usage=_usage(usage))
        return stopped + _event("message_stop")

    def fail(self, error: VolleyError) -> bytes:
        return _event("error", error=anthropic_error(error))

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Call):
            ended, index = self._end_block(), self._n_blocks
            begun = _event("content_block_start", index=index, content_block={**_block(piece), "input": {}})
            self._n_blocks += 1
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return ended + begun + self._delta(delta) + _event("content_block_stop", index=index)
        begun = b"" if self._open is type(piece) else self._end_block() + self._begin_block(piece)
        if isinstance(piece, Reasoning):
            return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})
        return begun + self._delta({"type": "text_delta", "text": piece.text})

    def _begin_block(self, piece: Reasoning | AnswerContent) -> bytes:
        self._open = type(piece)
        self._n_blocks += 1
        return _event("content_block_start", index=self._n_blocks - 1, content_block=_block(type(piece)("")))

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._n_blocks - 1, delta=delta)

    def _end_block(self) -> bytes:
        ended = b"" if self._open is None else _event("content_block_stop", index=self._n_blocks - 1)
        self._open = None
        return ended


def _event(type_: str, **fields: Any) -> bytes:
    return event({"type": type_, **fields}, type_)
