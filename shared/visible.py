"""Escape control characters in untrusted text that goes to a terminal, and quote it in commands to copy.

A terminal interprets escape sequences, and a reader trusts separate lines: a name with either could move the cursor,
recolour, hide or forge a command's output. A shell runs what it finds in a name: all text from outside in a command
that a reader may copy goes through `quoted`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 but the tab, delete, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029\ufeff\ud800-\udfff\U000e0000-\U000e007f]"  # ends of lines, byte order marks, halves of pairs, tags
)
_SHORT = {"\n": "\\n", "\r": "\\r"}


def visible(text: object) -> str:
    """Return the text as one line, each control character escaped as `\\x1b`, `\\n` or `\\u202e`. Idempotent."""
    return _CONTROLS.sub(_escaped, str(text))


def is_visible(text: object) -> bool:
    """Return True if the text holds no control characters."""
    return _CONTROLS.search(str(text)) is None


def quoted(*words: object) -> str:
    """Quote words for a shell. Control characters are made visible: a command with such a word names nothing."""
    return shlex.join(map(visible, words))


def shortened(names: Iterable[str], most: int = 8) -> str:
    """List names, the first `most` of them and the number of the others."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


def visible_json(text: str) -> str:
    """Escape control characters in JSON, except line ends; the value stays the same."""
    return "\n".join(_CONTROLS.sub(_escaped_json, line) for line in text.split("\n"))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in _SHORT:
        return _SHORT[match[0]]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped_json(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + ((code - 0x10000) >> 10):04x}\\u{0xDC00 + ((code - 0x10000) & 0x3FF):04x}"
