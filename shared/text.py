"""Replace text that is not valid Unicode by U+FFFD.

JSON may contain half of a surrogate pair ("\\ud83d"), as JavaScript and Java write it when they cut text inside an
emoji; Python's file names may contain one, too. UTF-8 encoders and tokenizers reject it. Text is repaired where it
enters: in requests, answers of environments, and outputs of tools.
"""

from __future__ import annotations

import codecs
import re

REPLACEMENT = "\ufffd"
HALVES = "volley.halves"
"""Error handler for decoding UTF-8: replaces an encoded half of a surrogate pair, and refuses other invalid bytes."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL
)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_N_HALF = len(rb"\ud83d")


def well_formed(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD; join two halves that belong together."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_halves(json: bytes) -> bytes:
    """Replace each JSON escape of half a surrogate pair by that of U+FFFD; keep other bytes."""
    if _HALF.search(json) is None:
        return json
    return _ESCAPE.sub(_mended_escape, json)


def _mended_escape(found: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if len(found[0]) == _N_HALF else found[0]


def _replace_half(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError) and _ENCODED_HALF.match(error.object, error.start):
        return REPLACEMENT, error.start + 3
    raise error


codecs.register_error(HALVES, _replace_half)
