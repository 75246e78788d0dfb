"""Prompts that only requests of clients have: words to continue, tools that a template ignores, and its variables."""

from __future__ import annotations

from itertools import takewhile

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.models.templates import Messages, Tools, Variables

_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names that are given to every template, and are no variables of its own."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of words to continue; a template that trims them also trims its space."""


def render_unfinished(tokenizer: ChatTokenizer, messages: Messages, tools: Tools = ()) -> list[int]:
    """Tokenize a conversation up to the last word of its last message, as transformers' `continue_final_message`.

    Raises InputError if the template changes the content of that message.
    """
    *before, last = messages
    content = last["content"]
    if last.get("tool_calls"):
        raise InputError(
            "the message to continue has tool_calls, which the text after its content would cut off",
            "leave them out, or write them into content",
        )
    text = tokenizer.templates.render([*before, {**last, "content": content + _TAG}], tools, prompt=False)
    text, found, after = text.rpartition(_TAG.strip())
    if not found or content.strip() not in text:
        raise InputError("the chat template does not write the content of the message to continue as it is")
    return tokenizer.encode(text if after.startswith(" ") else text.rstrip())


def check_variables(tokenizer: ChatTokenizer, variables: Variables) -> None:
    """Raise InputError naming a variable that no template reads."""
    names = tokenizer.templates.names
    if unread := sorted(variables.keys() - (names - _OWN)):
        known = ", ".join(sorted(names - _OWN - tokenizer.templates.given.keys()))
        raise InputError(
            f"the chat template has no variable {unread[0][:80]!r}", f"variables that it reads: {known or 'none'}"
        )


def leaves_out(tokenizer: ChatTokenizer, messages: Messages, tools: Tools) -> bool:
    """True if the template ignores the `tools` in what comes before the first answer. Raises InputError."""
    before = [*takewhile(lambda message: message["role"] != "assistant", messages)] or messages
    return bool(tools) and tokenizer.templates.render(before, tools) == tokenizer.templates.render(before)
