"""Limits on the number and nesting of values in a body, and on the length of text.

A byte of msgpack can become an empty dict of 64 bytes, a byte of JSON a list, so a limit on bytes limits neither memory
nor time. Both checks scan the bytes without creating values, skip text and arrays, and stop at the limit. They do not
validate; the decoder does.
"""

from __future__ import annotations

import re
from typing import Any

from shared.errors import DecodeError
from shared.text import well_formed

MAX_OBJECTS = 2**17
"""Default limit on the values of one body: at most about ten megabytes and ten milliseconds."""
MAX_LINE_VALUES = 10_000
"""Limit on the values of one line of a record; a line of metrics has about a hundred."""
MAX_DEPTH = 64
MAX_URL = 500
"""Characters of an address that a request names."""
MAX_SHOWN = 32
"""Demonstrations of one request."""
MAX_CALLS = 1000
"""Tool calls of one message; the rest is not read."""

_SCALARS = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_FIXED_EXTENSIONS = {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_BLOBS = {
    0xC4: (1, 2),
    0xC5: (2, 3),
    0xC6: (4, 5),
    0xC7: (1, 3),
    0xC8: (2, 4),
    0xC9: (4, 6),
    0xD9: (1, 2),
    0xDA: (2, 3),
    0xDB: (4, 5),
}
"""Binary, extensions and text: first byte -> (bytes of the length, bytes before the data)."""
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Arrays and maps: first byte -> (bytes of the count, values an entry)."""


def _fixed_size(tag: int) -> int:
    """Size in bytes of a value that starts with `tag`; 0 if the tag does not determine it."""
    if 0xA0 <= tag < 0xC0:
        return 1 + (tag & 0x1F)
    if tag < 0x80 or tag >= 0xE0 or 0xC0 <= tag < 0xC4:
        return 1
    return {**_SCALARS, **_FIXED_EXTENSIONS}.get(tag, 0)


_FIXED = bytes(map(_fixed_size, range(256)))

_JSON_TOKEN = re.compile(rb'["\[\]{},]')
_JSON_TEXT = re.compile(rb'(?:[^"\\]++|\\.){0,4096}+', re.DOTALL)  # in pieces, between which other threads may run


def check_msgpack(data: bytes, what: str, max_objects: int = MAX_OBJECTS) -> None:
    """Raise DecodeError if the first value of `data` holds more than `max_objects` values or nests too deeply."""
    at, end, n, left = 0, len(data), 1, 1
    outer: list[int] = []  # remaining values of each enclosing container
    while at < end:
        tag = data[at]
        if size := _FIXED[tag]:
            at += size
        elif blob := _BLOBS.get(tag):
            at += blob[1] + int.from_bytes(data[at + 1 : at + 1 + blob[0]])
        else:
            at, inside = _container(data, at, tag)
            n += inside
            if n > max_objects:
                raise _too_many(what, max_objects)
            if inside:
                outer.append(left)
                left = inside
                if len(outer) > MAX_DEPTH:
                    raise _too_deep(what)
                continue
        left -= 1
        while not left:
            if not outer:
                return
            left = outer.pop() - 1


def _container(data: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return the offset of a container's first value and the number of values it declares."""
    if tag < 0xA0:
        return at + 1, (tag & 0x0F) * (1 if tag >= 0x90 else 2)
    width, each = _CONTAINERS[tag]
    return at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width]) * each


def check_json(data: bytes, what: str, max_objects: int = MAX_OBJECTS) -> None:
    """Raise DecodeError if `data` holds more than `max_objects` values and commas, or nests deeper than MAX_DEPTH."""
    n_opened = data.count(b"[") + data.count(b"{")
    is_short = len(data) <= max_objects or n_opened + data.count(b'"') + data.count(b",") <= max_objects
    if n_opened <= MAX_DEPTH and is_short:
        return  # true even if none of the marks is inside a string
    at, n, depth = 0, 0, 0
    while found := _JSON_TOKEN.search(data, at):
        at, token = found.end(), found[0]
        if token in b"]}":
            depth -= 1
            continue
        n += 1
        if n > max_objects:
            raise _too_many(what, max_objects)
        if token == b'"':
            at = _end_of_text(data, at)
        elif token in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(what)


def _end_of_text(data: bytes, at: int) -> int:
    """Return the offset after the closing quote of the string that starts at `at`, or the end of `data`."""
    while (found := _JSON_TEXT.match(data, at)) and found.end() > at:
        at = found.end()
    return at + 1 if data[at : at + 1] == b'"' else len(data)


def _too_many(what: str, max_objects: int) -> DecodeError:
    return DecodeError(
        f"{what} holds more than {max_objects} values", "send numbers as arrays (msgpack), or send less at once"
    )


def _too_deep(what: str) -> DecodeError:
    return DecodeError(f"{what} is nested more than {MAX_DEPTH} deep", "send a flatter structure")


def shortened(text: str, most: int) -> str:
    """Shorten a text to about `most` characters: its start, how much was left out, and its end."""
    text = well_formed(text)
    if len(text) <= most:
        return text
    tail = most // 3
    head = most - tail
    return f"{text[:head]}\n[… {len(text) - most} of {len(text)} characters left out …]\n{text[-tail:]}"


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether `value` is one of the options by JSON's equality (false is not 0); an array never is."""
    return any(type(value) in ((int, float) if type(one) is int else (type(one),)) and value == one for one in allowed)
