"""Conversations with tools, for chat templates that leave tools out.

A system message describes the tools, or the first message where the template refuses system messages. Calls are text
in the format `hermes`, which `AnswerReader` reads back. Results keep the role `tool`.
"""

from __future__ import annotations

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.models.templates import Messages, Tools
from volley_serving.dialects.calls import with_calls_written
from volley_serving.templates.answers import AnswerRenderer, CallForm
from volley_serving.templates.prompts import leaves_out
from volley_serving.templates.tool_text import add_to_system, describe_tools

_HERMES = CallForm("", '<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")


def with_tools_written(tokenizer: ChatTokenizer, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    """Return messages and tools to render: as they are, or with the tools described and none left.

    A description adds at most one message, at the beginning. Raises InputError.
    """
    if not leaves_out(tokenizer, messages, tools):
        return messages, tools
    written = [
        {"role": "assistant", "content": with_calls_written(message)} if message.get("tool_calls") else message
        for message in messages
    ]
    text, first = describe_tools(tools), written[0]
    if first["role"] == "user" and not _takes_system(tokenizer):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *written[1:]], ()
    return add_to_system(written, text), ()


def _takes_system(tokenizer: ChatTokenizer) -> bool:
    try:
        tokenizer.templates.render([{"role": "system", "content": "1"}, {"role": "user", "content": "1"}])
    except InputError:
        return False
    return True


def call_form(tokenizer: ChatTokenizer, messages: Messages, tools: Tools) -> CallForm:
    """Find the form of a call, also where the template leaves tools out. Raises InputError."""
    if leaves_out(tokenizer, messages, tools):
        return _HERMES
    return AnswerRenderer(tokenizer).call_form(messages, tools)
