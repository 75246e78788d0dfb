"""Conversations with tools, for chat templates that leave tools out.

A system message describes the tools, and calls are text in the format `hermes`, which `AnswerReader` reads back.
Results keep the role `tool`.
"""

from __future__ import annotations

from shared.models.chat import ChatTokenizer
from shared.models.templates import Messages, Tools
from volley_serving.dialects.calls import with_calls_written
from volley_serving.templates.answers import AnswerRenderer, CallForm
from volley_serving.templates.prompts import leaves_out
from volley_serving.templates.tool_text import add_to_system, describe_tools

_HERMES = CallForm("", '<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")


def with_tools_written(tokenizer: ChatTokenizer, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
    """Return messages and tools to render: as they are, or with the tools described and none left.

    A description adds one message at the beginning, or none if there is a system message. Raises InputError.
    """
    if not leaves_out(tokenizer, messages, tools):
        return messages, tools
    written = [
        {"role": "assistant", "content": with_calls_written(message)} if message.get("tool_calls") else message
        for message in messages
    ]
    return add_to_system(written, describe_tools(tools)), ()


def call_form(tokenizer: ChatTokenizer, messages: Messages, tools: Tools) -> CallForm:
    """Find the form of a call, also where the template leaves tools out. Raises InputError."""
    if leaves_out(tokenizer, messages, tools):
        return _HERMES
    return AnswerRenderer(tokenizer).call_form(messages, tools)
