"""The codec: exact round trips, and nothing but DecodeError from bytes that are not ours."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import DecodeError

ARRAYS = st.sampled_from(["<i4", "<f4", "u1", "<i8", "<f8"]).flatmap(
    lambda dtype: st.binary(max_size=64).map(
        lambda b: np.frombuffer(b[: len(b) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize], dtype)
    )
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b and type(a) is type(b)


@given(VALUES)
def test_round_trip(value):
    assert same(codec.unpack(codec.pack(value)), value)


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error_or_a_value(data):
    with contextlib.suppress(DecodeError):
        codec.unpack(data)


def test_nine_bytes_a_token():
    n = 10_000
    arrays = {"i": np.zeros(n, np.int32), "l": np.zeros(n, np.float32), "m": np.zeros(n, np.uint8)}
    assert len(codec.pack(arrays)) <= 9 * n + 64


def test_wire_bytes_are_little_endian():
    packed = codec.pack(np.array([1], ">i4"))
    assert packed == msgpack.packb(msgpack.ExtType(1, b"\x01\x00\x00\x00"))


@pytest.mark.parametrize("value", [np.zeros((2, 2), np.int32), np.zeros(2, np.complex64), object()])
def test_what_cannot_travel_is_refused(value):
    with pytest.raises(TypeError):
        codec.pack(value)


def test_deep_nesting_is_a_decode_error():
    with pytest.raises(DecodeError):
        codec.unpack(b"\x91" * 5000 + b"\x00")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        b'{"a": 1, "b": {"c": ":", "c": 2}}',
        b'[{"a" :1,"\\u0061":1}]',
        b'{"a":":","a":"::"}',
    ],
)
def test_a_record_that_says_two_things_under_one_key_is_refused(text: bytes):
    assert codec.from_json(text)
    with pytest.raises(DecodeError, match="a key twice"):
        codec.from_record(text)


@pytest.mark.parametrize("text", [b'{"a":1,"b":{"a":"a:b"}}', b'[{"a": 1}, {"a": 1}]', b'"a:b"', b"7", b'{"n":1}'])
def test_a_record_with_every_key_once_is_taken(text: bytes):
    assert codec.from_record(text) == codec.from_json(text)
