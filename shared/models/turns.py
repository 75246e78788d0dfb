"""Text that a chat template writes around an assistant's turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from shared.errors import InputError
from shared.models.templates import ChatTemplates, Messages, Tools

MARKER = "\u0001assistant\u0001"
QUESTION = {"role": "user", "content": "?"}
_BLOCK = re.compile(r"\s*(<think>\s*</think>|<think>\s*$|<\|channel>thought\s*<channel\|>)\s*")


class TurnRenderer:
    """Renderer of assistant's turns with one set of chat templates."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates

    def check_written(self, before: Messages, messages: Messages, tools: Tools = (), after: str = "") -> None:
        """Check that the template writes the messages. Raises InputError naming the role of one that it leaves out.

        Args:
            after: end of the text of `before`; messages must stand after it.
        """
        probed = [_probed(message, i) for i, message in enumerate(messages)]
        try:
            text = self._templates.render([*before, *probed], tools)
        except InputError:  # the template reads the texts of messages
            return
        start = text.find(after)
        _check_probes(probed, text[start + len(after) :] if start >= 0 else text)

    @property
    def writes_text(self) -> bool:
        """True if the template writes the text of a user's message, or refuses a single message."""
        try:
            return MARKER in self._templates.render([{"role": "user", "content": MARKER}])
        except InputError:
            return True

    @cached_property
    def closing(self) -> str:
        """Text after an assistant's words at the end of a conversation."""
        said = {"role": "assistant", "content": MARKER}
        return self._templates.render([QUESTION, said], prompt=False).partition(MARKER)[2]

    @cached_property
    def writes_content(self) -> bool:
        """True if the template writes the content of an assistant's message."""
        said = {"role": "assistant", "content": MARKER}
        return MARKER in self._templates.render([QUESTION, said], prompt=False)


def rest_after(prompt: str, written: str) -> str | None:
    """Return what a template writes after the text of a prompt; None if it does not write this text again.

    Empty and opened blocks of reasoning do not count.
    """
    if _BLOCK.search(prompt) or _BLOCK.search(written):
        prompt, written = (_BLOCK.sub("\n", text).rstrip() for text in (prompt, written))
    return written[len(prompt) :] if written.startswith(prompt) else None


def common_length(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def probe(*place: object) -> str:
    """Word that occurs in no conversation."""
    return "x".join(("probe", *map(str, place), "end"))


def _probed(message: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    return message if message["role"] == "assistant" else {**message, "content": probe(i)}


def _check_probes(probed: Messages, text: str) -> None:
    written = text.lower()
    for message in probed:
        if message["role"] != "assistant" and message["content"] not in written:
            raise InputError(
                f"the chat template leaves out messages of role {message['role']} at this place in the conversation",
                "use a role that it writes there, such as user",
            )
