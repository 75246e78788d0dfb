"""Text that is not valid Unicode: U+FFFD takes the place of what no encoding can hold.

JSON may write half of a surrogate pair ("\\ud83d"), as JavaScript and Java do when they cut text inside an emoji, and
Python's names of files may hold one. No UTF-8 encoder takes it, nor do tokenizers. Text is mended here, where it
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
    """`text` with U+FFFD for each half of a surrogate pair; two halves that belong together become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_halves(json: bytes) -> bytes:
    """JSON in which each escape of half a surrogate pair is that of U+FFFD. Other bytes are left as they are."""
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
