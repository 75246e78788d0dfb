"""msgpack with arrays as raw little-endian bytes, and JSON.

A one-dimensional numpy array travels as a msgpack extension type: the code is the dtype, the data the raw buffer. A
token takes 9 bytes: int32 id, float32 log-probability, uint8 mask.

`errors` says how to treat invalid text: "halves" replaces halves of surrogate pairs by U+FFFD, "replace" also other
bytes that are not UTF-8 (shared.text), for requests and foreign answers; "strict" is for records that Volley wrote.

Nothing is ever unpickled. Every malformed input raises `DecodeError`, and none decodes to more values than its reader
allows (shared.bounds).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgpack
import numpy as np
import orjson

from shared.bounds import MAX_OBJECTS, check_json, check_msgpack
from shared.errors import DecodeError
from shared.text import HALVES, without_halves

type Errors = Literal["strict", "halves", "replace"]

MEDIA_TYPE = "application/msgpack"
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("u1"),
    4: np.dtype("<i8"),
    5: np.dtype("<f8"),
    6: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PLAIN = 1  # msgpack's own time stamps, which `pack` never writes, become plain floats
_HANDLERS: Mapping[Errors, str] = {"strict": "strict", "halves": HALVES, "replace": "replace"}
_MAX_DEPTH_ERRORS = (ValueError, TypeError, RecursionError, OverflowError, KeyError)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        code = _CODES.get(value.dtype.newbyteorder("<"))
        if value.ndim != 1 or code is None:
            raise TypeError(
                f"only 1-D arrays of {[str(d) for d in _CODES]} can be encoded, not {value.dtype}{list(value.shape)}"
            )
        return msgpack.ExtType(code, np.ascontiguousarray(value, _DTYPES[code]).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode(code: int, data: bytes) -> np.ndarray:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown array type {code}")
    return np.frombuffer(data, dtype)


def pack(value: Any) -> bytes:
    """Encode dicts, lists, scalars, strings, bytes and 1-D arrays (int32, float32, uint8, int64, float64, uint16)."""
    packed: Any = msgpack.Packer(default=_encode, use_bin_type=True).pack(value)  # None only without autoreset
    return packed


def unpack(data: bytes, what: str = "body", max_objects: int = MAX_OBJECTS, errors: Errors = "strict") -> Any:
    """Decode what `pack` made. Arrays are read-only views of `data`.

    Raises:
        DecodeError: the bytes are not one whole msgpack value, hold an unknown array type or more than `max_objects`
    values (an array is one), or nest too deeply.
    """
    check_msgpack(data, what, max_objects)
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_decode,
            raw=False,
            strict_map_key=True,
            timestamp=_PLAIN,
            unicode_errors=_HANDLERS[errors],
        )
    except (msgpack.UnpackException, *_MAX_DEPTH_ERRORS) as error:
        raise DecodeError(f"{what} is not valid msgpack: {type(error).__name__}: {error}") from error


def from_json(data: bytes, what: str = "body", max_objects: int = MAX_OBJECTS, errors: Errors = "strict") -> Any:
    """Decode JSON.

    Raises:
        DecodeError: the bytes are not one JSON value, hold more than `max_objects` values, or nest too deeply.
    """
    check_json(data, what, max_objects)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if errors == "strict":
            raise _invalid(what, error) from error
    try:
        return orjson.loads(without_halves(data.decode("utf-8", _HANDLERS[errors]).encode()))
    except ValueError as error:
        raise _invalid(what, error) from error


def _invalid(what: str, error: ValueError) -> DecodeError:
    return DecodeError(f"{what} is not valid JSON: {error}")


def from_record(data: bytes, what: str = "record", max_objects: int = MAX_OBJECTS) -> Any:
    """Decode a JSON record of a run's folder; reject duplicate keys, which are ambiguous.

    Raises:
        DecodeError: as `from_json`, and for an object with a duplicate key.
    """
    value = from_json(data, what, max_objects)
    n_colons = data.count(b":")
    is_flat = isinstance(value, dict) and len(value) == n_colons
    if not is_flat and n_colons != _n_keys(value):  # otherwise no key is duplicated
        try:
            json.loads(data, object_pairs_hook=_once, parse_int=str, parse_float=str)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"{what} is not valid JSON: {error}") from error
    return value


def _n_keys(value: Any) -> int:
    """Count the keys of all objects in a value."""
    n, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            n += len(one)
            left += [x for x in one.values() if isinstance(x, dict | list)]
        elif isinstance(one, list):
            left += [x for x in one if isinstance(x, dict | list)]
    return n


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has a key twice")


def by_type(
    content_type: str,
    data: bytes,
    what: str = "body",
    max_objects: int = MAX_OBJECTS,
    errors: Errors = "halves",
) -> Any:
    """Decode msgpack or JSON, by Content-Type. Raises DecodeError."""
    decode = unpack if content_type.startswith(MEDIA_TYPE) else from_json
    return decode(data, what, max_objects, errors)
