"""Protocol-buffer wire format (proto3), as far as Tinker's messages need it.

Messages are read into fields by number, and written field by field. `messages` knows the numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from shared.errors import DecodeError

type Value = int | float | memoryview
type Fields = Mapping[int, Sequence[Value]]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_BITS = 64


def read(
    data: bytes | memoryview, *, doubles: frozenset[int] = frozenset(), most: int = 1 << 16
) -> dict[int, list[Value]]:
    """Read a message: values by field number, in order. Values of length-delimited fields are views of `data`.

    Args:
        doubles: numbers of 64-bit fields that hold a float.
        most: largest number of values.

    Raises DecodeError.
    """
    found: dict[int, list[Value]] = {}
    for n, (number, value) in enumerate(_values(memoryview(data), doubles)):
        if n >= most:
            raise DecodeError(f"a message holds more than {most} values")
        found.setdefault(number, []).append(value)
    return found


def _values(data: memoryview, doubles: frozenset[int]) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: Value
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            raw = _slice(data, at, size)
            value = (
                struct.unpack("<d" if size == 8 else "<f", raw)[0]
                if number in doubles
                else int.from_bytes(raw, "little")
            )
            at += size
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value = _slice(data, at, size)
            at += size
        else:
            raise DecodeError(f"the message has a field of unknown kind {kind}")
        yield number, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift >= _MOST_BITS:
            raise DecodeError("the message ends within a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (1 << _MOST_BITS) - 1, at


def _slice(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise DecodeError("the message ends within a field")
    return data[at : at + size]


def signed(value: Value) -> int:
    """Return a varint as an int32 or int64. Raises DecodeError for another kind."""
    if not isinstance(value, int):
        raise DecodeError("a field of the message has the wrong kind")
    return value - (1 << _MOST_BITS) if value >> (_MOST_BITS - 1) else value


def text(value: Value) -> str:
    """Return a length-delimited value as text. Raises DecodeError."""
    try:
        return bytes(part(value)).decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a text of the message is not UTF-8") from error


def part(value: Value) -> memoryview:
    """Return a length-delimited value. Raises DecodeError for another kind."""
    if not isinstance(value, memoryview):
        raise DecodeError("a field of the message has the wrong kind")
    return value


def integers(values: Sequence[Value]) -> list[int]:
    """Read a repeated integer field, packed or not. Raises DecodeError."""
    made = list[int]()
    for value in values:
        if isinstance(value, memoryview):
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                made.append(signed(one))
        else:
            made.append(signed(value))
    return made


def varint(number: int, value: int) -> bytes:
    """Write an integer field; 0 is left out."""
    return _tag(number, _VARINT) + _number(value) if value else b""


def delimited(number: int, value: bytes | str) -> bytes:
    """Write a field of bytes, a text, or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _tag(number, _BYTES) + _number(len(data)) + data


def double(number: int, value: float) -> bytes:
    """Write a float64 field."""
    return _tag(number, _FIXED64) + struct.pack("<d", value)


def packed(number: int, values: Sequence[int]) -> bytes:
    """Write a repeated integer field."""
    return delimited(number, b"".join(map(_number, values))) if values else b""


def _tag(number: int, kind: int) -> bytes:
    return _number(number << 3 | kind)


def _number(value: int) -> bytes:
    value &= (1 << _MOST_BITS) - 1
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
