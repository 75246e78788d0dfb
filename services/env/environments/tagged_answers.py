"""Find the final answer in a model's text. Never raises; takes linear time."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def tagged_answer(text: str) -> str | None:
    """Text inside the last closed <answer>; None if there is none."""
    opened, body = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            body, opened = text[opened : tag.start()], None
    return body
