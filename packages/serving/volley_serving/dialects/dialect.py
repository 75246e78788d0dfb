"""Dialects of clients by name: how each reads a body and writes an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shared.models.chat import ChatTokenizer
from volley_serving.dialects import chat, completions, messages, messages_answer, responses, responses_answer
from volley_serving.dialects.events import AnswerStream
from volley_serving.dialects.records import Answered, Asked, Head, Usage


@dataclass(frozen=True, slots=True)
class Dialect[Body: BaseModel]:
    """A client API: how its requests are parsed and its answers written.

    Attributes:
        body: model of a request's body.
        read: translates a body; raises InputError naming what cannot be honoured.
        write: writes finished answers as JSON.
        stream: begins a stream of answers.
        format_key: field that asks for JSON.
        default_tokens: `max_tokens` of a request that names none; None for as many as fit.
    """

    body: type[Body]
    read: Callable[[Body], Asked]
    write: Callable[[Asked, Head, Sequence[Answered], Usage, ChatTokenizer], dict[str, Any]]
    stream: Callable[[Asked, Head, ChatTokenizer], AnswerStream]
    format_key: str = "response_format"
    default_tokens: int | None = None


CHAT = Dialect(chat.ChatBody, chat.read, chat.write, chat.ChatStream)
COMPLETIONS = Dialect(
    completions.CompletionBody,
    completions.read,
    completions.write,
    completions.CompletionStream,
    default_tokens=completions.DEFAULT_TOKENS,
)
RESPONSES = Dialect(
    responses.ResponsesBody,
    responses.read,
    responses_answer.write,
    responses_answer.ResponsesStream,
    format_key="text.format",
)
MESSAGES = Dialect(
    messages.MessagesBody,
    messages.read,
    messages_answer.write,
    messages_answer.MessagesStream,
    format_key="output_config.format",
)
