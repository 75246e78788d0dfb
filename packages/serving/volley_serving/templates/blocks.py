"""`{% generation %}` blocks of chat templates, which mark the text that an assistant says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2

from shared.errors import InputError
from shared.models.templates import ChatTemplates, Messages, Tools, block_writer

type Spans = tuple[tuple[int, int], ...]
"""Parts of a text as pairs of character positions, the end exclusive."""


def render_marked(templates: ChatTemplates, messages: Messages, tools: Tools) -> tuple[str, Spans | None]:
    """Render a finished conversation, and locate its `{% generation %}` blocks where transformers does.

    The spans are None if the template has no such blocks. Raises InputError, also if the text of a block is not at
    its span.
    """
    if not templates.marks(tools):
        return templates.render(messages, tools, prompt=False), None
    blocks = _Blocks()
    text = templates.render(messages, tools, prompt=False, write=blocks.write)
    if any(text[begin : begin + len(written)] != written for begin, written in blocks.found):
        raise InputError(
            "transformers marks other text than that in the chat template's {% generation %} blocks",
            "move the blocks out of macros and variables, and do not edit their text",
        )
    return text, tuple((begin, begin + len(written)) for begin, written in blocks.found)


class _Blocks:
    """Positions of `{% generation %}` blocks in a text, counted as transformers' `AssistantTracker` does.

    A block begins after the text that the template has yielded before it. Blocks inside another block do not count.

    Attributes:
        found: (beginning, text) of each.
    """

    def __init__(self) -> None:
        self.found = list[tuple[int, str]]()
        self._length, self._depth = 0, 0

    def write(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render the template."""
        chunks, token = list[str](), block_writer.set(self.block)
        try:
            for chunk in template.generate(variables):
                chunks.append(chunk)
                self._length += len(chunk)
        finally:
            block_writer.reset(token)
        return "".join(chunks)

    def block(self, write: Callable[[], str]) -> str:
        """Render a block and note its position."""
        self._depth += 1
        text = write()
        self._depth -= 1
        if not self._depth:
            self.found.append((self._length, text))
        return text
