"""Reader of JSON values inside a longer text, of bounded size and depth, with reasons that a model can learn from."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shared.bounds import check_json
from shared.errors import DecodeError
from shared.text import without_halves

MAX_ARGUMENTS = 2**18
"""Characters of one value."""
MAX_VALUES = 10_000
"""Values inside one value."""
_CUT = 12
"""Distance in characters from the end of a truncated text within which truncation may cause a parse error."""
_SPACE = re.compile(r"\s*")


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value at `at`; return it and its end. Raises ValueError with a reason."""
    part = text[at : at + MAX_ARGUMENTS + 1]  # bounded, because an error counts the lines of the whole text
    try:
        value, end = _DECODER.raw_decode(part)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if len(part) > MAX_ARGUMENTS and (error.pos > len(part) - _CUT or error.msg.startswith("Unterminated")):
            raise ValueError(f"it has more than {MAX_ARGUMENTS} characters") from None
        raise ValueError(f"{error.msg} at its character {error.pos + 1}") from None
    if end > MAX_ARGUMENTS:
        raise ValueError(f"it has more than {MAX_ARGUMENTS} characters")
    read = part[:end].encode("utf-8", "replace")
    try:
        check_json(read, "it", MAX_VALUES)
    except DecodeError as error:
        raise ValueError(error.detail) from None
    mended = without_halves(read)
    return (value if mended == read else _DECODER.decode(mended.decode())), at + end


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def after_space(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
