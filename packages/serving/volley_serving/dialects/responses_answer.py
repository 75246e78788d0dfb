"""Answers of OpenAI's Responses API, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import VolleyError
from shared.models.chat import ChatTokenizer
from volley_serving.dialects.chat import token_rows
from volley_serving.dialects.errors import openai_error
from volley_serving.dialects.events import event
from volley_serving.dialects.records import AnswerContent, Answered, Asked, Call, Head, Piece, Reasoning, Sampled, Usage

type Item = dict[str, Any]


def write(
    asked: Asked, head: Head, answers: Sequence[Answered], usage: Usage, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Write the only answer as the JSON of a `response`."""
    (answer,) = answers
    items = [_item(head, i, piece) for i, piece in enumerate(answer.pieces or [AnswerContent("")])]
    if asked.logprobs:
        rows = token_rows(answer.sampled, tokenizer.token)
        for item in [one for one in items if one["type"] == "message"][:1]:
            item["content"][0]["logprobs"] = rows
    return _finished(asked, head, answer, usage, items)


def _finished(asked: Asked, head: Head, answer: Answered, usage: Usage, items: Sequence[Item]) -> dict[str, Any]:
    cut = {"length": "max_output_tokens", "abort": "content_filter"}.get(answer.finish_reason)
    body = _response(asked, head, "incomplete" if cut else "completed", items)
    body["incomplete_details"] = {"reason": cut} if cut else None
    body["usage"] = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
    return body


def _response(asked: Asked, head: Head, status: str, items: Sequence[Item]) -> dict[str, Any]:
    choice = {"type": "function", "name": asked.tool_name} if asked.tool_name else asked.tool_choice
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": asked.sampling.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": [*items],
        "parallel_tool_calls": asked.parallel_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": asked.sampling.temperature,
        "text": {"format": {"type": "text"} if asked.schema is None else _format(asked.schema)},
        "tool_choice": choice,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools],
        "top_logprobs": asked.top_logprobs,
        "top_p": asked.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _format(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "name": "answer", "schema": schema} if schema else {"type": "json_object"}


def _item(head: Head, i: int, piece: Piece, status: str = "completed") -> Item:
    """Write a piece as item i of the output."""
    id_ = f"{head.id}{i}"
    match piece:
        case Reasoning(text):
            parts = [{"type": "reasoning_text", "text": text}] if text else []
            return {"type": "reasoning", "id": f"rs_{id_}", "summary": [], "content": parts, "status": status}
        case AnswerContent(text):
            parts = [_part(text)] if status == "completed" else []
            return {"type": "message", "id": f"msg_{id_}", "status": status, "role": "assistant", "content": parts}
        case Call():
            arguments = piece.arguments if status == "completed" else ""
            call = {"call_id": piece.id, "name": piece.name, "arguments": arguments}
            return {"type": "function_call", "id": f"fc_{id_}", "status": status, **call}


def _part(text: str, rows: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*rows]}


class ResponsesStream:
    """Encoder of the events of one response. See `AnswerStream`."""

    def __init__(self, asked: Asked, head: Head, tokenizer: ChatTokenizer) -> None:
        self._asked, self._head, self._tokenizer = asked, head, tokenizer
        self._n_events = 0
        self._items = list[Item]()  # finished ones
        self._open: type[Reasoning | AnswerContent] | None = None
        self._answer: Answered | None = None
        self._text = ""  # of the open item
        self._rows = list[dict[str, Any]]()  # log-probabilities of tokens whose text is not sent yet
        self._part_rows = list[dict[str, Any]]()  # those of the open item

    def begin(self, n_prompt: int = 0) -> bytes:
        body = _response(self._asked, self._head, "in_progress", [])
        return b"".join(self._event(f"response.{name}", response=body) for name in ("created", "in_progress"))

    def add(self, i: int, pieces: Sequence[Piece], sampled: Sampled | None = None) -> bytes:
        if self._asked.logprobs and sampled is not None:
            self._rows += token_rows(sampled, self._tokenizer.token)
        return b"".join(self._piece(piece) for piece in pieces)

    def finish(self, i: int, answer: Answered) -> bytes:
        self._answer = answer
        empty = b"" if self._items or self._open else self._begin_item(AnswerContent(""))
        return empty + self._end_item()

    def end(self, usage: Usage) -> bytes:
        assert self._answer is not None
        body = _finished(self._asked, self._head, self._answer, usage, self._items)
        return self._event(f"response.{body['status']}", response=body)

    def fail(self, error: VolleyError) -> bytes:
        body = _response(self._asked, self._head, "failed", self._items)
        written = openai_error(error)
        body["error"] = {"code": error.api_code or "server_error", "message": written["message"]}
        del written["type"]  # the event's own
        return self._event("error", **written) + self._event("response.failed", response=body)

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Call):
            return self._end_item() + self._call(piece)
        begun = b"" if self._open is type(piece) else self._end_item() + self._begin_item(piece)
        self._text += piece.text
        if isinstance(piece, Reasoning):
            return begun + self._event("response.reasoning_text.delta", **self._place(), delta=piece.text)
        rows, self._rows = self._rows, []
        self._part_rows += rows
        return begun + self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=rows)

    def _call(self, call: Call) -> bytes:
        n = len(self._items)
        item = _item(self._head, n, call)
        place = {"item_id": item["id"], "output_index": n}
        begun = _item(self._head, n, call, "in_progress")
        self._items.append(item)
        arguments = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", output_index=n, item=begun)
            + self._event(f"{arguments}.delta", **place, delta=call.arguments)
            + self._event(f"{arguments}.done", **place, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=n, item=item)
        )

    def _begin_item(self, piece: Reasoning | AnswerContent) -> bytes:
        self._open, self._text, self._part_rows = type(piece), "", []
        n = len(self._items)
        begun = _item(self._head, n, type(piece)(""), "in_progress")
        added = self._event("response.output_item.added", output_index=n, item=begun)
        return added + self._event("response.content_part.added", **self._place(), part=self._open_part(""))

    def _end_item(self) -> bytes:
        if self._open is None:
            return b""
        item, place, part = (
            _item(self._head, len(self._items), self._open(self._text)),
            self._place(),
            self._open_part(),
        )
        if self._open is AnswerContent:
            item["content"] = [part]
            done = self._event("response.output_text.done", **place, text=self._text, logprobs=self._part_rows)
        else:
            done = self._event("response.reasoning_text.done", **place, text=self._text)
        n, self._open = len(self._items), None
        self._items.append(item)
        return (
            done
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=n, item=item)
        )

    def _open_part(self, text: str | None = None) -> dict[str, Any]:
        text = self._text if text is None else text
        return _part(text, self._part_rows) if self._open is AnswerContent else {"type": "reasoning_text", "text": text}

    def _place(self) -> dict[str, Any]:
        """Return the place of the open item's text."""
        n = len(self._items)
        prefix = "msg" if self._open is AnswerContent else "rs"
        return {"item_id": f"{prefix}_{self._head.id}{n}", "output_index": n, "content_index": 0}

    def _event(self, type_: str, **fields: Any) -> bytes:
        self._n_events += 1
        return event({"type": type_, "sequence_number": self._n_events - 1, **fields}, type_)
