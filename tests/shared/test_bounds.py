"""Bodies are bounded in values and depth before they are decoded; what is honest passes, whatever it says."""

import json
import threading
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import bounds, codec
from shared.errors import DecodeError
from shared.process import offload
from tests.fuzz.values import JSON, WIRE

MANY = 2 * bounds.MAX_OBJECTS


def count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(count(k) + count(v) for k, v in value.items())
    return 1 + (sum(map(count, value)) if isinstance(value, list) else 0)


def array_of(n: int, item: bytes) -> bytes:
    return b"\xdd" + n.to_bytes(4, "big") + item * n


HOSTILE_MSGPACK = {
    "empty maps": array_of(8 * 2**20, b"\x80"),
    "empty lists": array_of(8 * 2**20, b"\x90"),
    "small ints": array_of(8 * 2**20, b"\x01"),
    "texts of one character": array_of(4 * 2**20, b"\xa1a"),
    "lists of empty maps": array_of(2**19, b"\x9f" + b"\x80" * 15),
    "maps in arrays that end": array_of(MANY // 2, b"\x91\x80"),
    "a map that says it is huge": b"\xdf\xff\xff\xff\xff",
    "maps deep in maps": b"\x81\xa1k" * 2**20 + b"\xc0",
    "a little too deep": b"\x91" * (bounds.MAX_DEPTH + 1) + b"\xc0",
}
HOSTILE_JSON = {
    "empty maps": b"[" + b"{}," * 2**21 + b"0]",
    "empty lists": b"[" + b"[]," * 2**21 + b"0]",
    "small ints": b"[" + b"1," * 2**22 + b"1]",
    "texts of one character": b"[" + b'"a",' * 2**21 + b"0]",
    "members": b'{"a":1' + b',"a":1' * 2**20 + b"}",
    "deep lists": b"[" * 2**20,
    "deep maps": b'{"a":' * 2**20,
    "a little too deep": b"[" * (bounds.MAX_DEPTH + 1) + b"]" * (bounds.MAX_DEPTH + 1),
    "values behind a text": b'["' + b'\\"[,{' * 1000 + b'"' + b",1" * MANY + b"]",
}


@pytest.mark.parametrize("name", HOSTILE_MSGPACK)
def test_hostile_msgpack_is_refused_before_it_costs_memory(name: str) -> None:
    assert peak_of(lambda: codec.unpack(HOSTILE_MSGPACK[name])) < 2**20


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json_is_refused_before_it_costs_memory(name: str) -> None:
    """`members` at the bound of a body, the others at less: tracing memory is slow."""
    most = bounds.MAX_OBJECTS if name == "members" else bounds.MAX_OBJECTS // 8
    assert peak_of(lambda: codec.from_json(HOSTILE_JSON[name], max_objects=most)) < 2**20


def peak_of(decode: object) -> int:
    assert callable(decode)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=r"holds more than|nested more than"):
            decode()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(WIRE, st.integers(-2, 2))
def test_msgpack_values_are_counted_exactly(value: object, off: int) -> None:
    packed = codec.pack(value)
    n = count(codec_tree(packed))
    if off < 0 and n > 1:
        with pytest.raises(DecodeError, match="more than"):
            bounds.check_msgpack(packed, "body", n + off)
    else:
        bounds.check_msgpack(packed, "body", max(n, n + off))


def codec_tree(packed: bytes) -> object:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False, unicode_errors="surrogatepass")


@given(JSON)
def test_json_of_as_many_values_as_are_allowed_passes(value: object) -> None:
    text = json.dumps(value).encode()
    bounds.check_json(text, "body", 2 * count(value))


@given(st.binary(max_size=300))
def test_bytes_that_are_nothing_end_the_walk(data: bytes) -> None:
    for check in (bounds.check_msgpack, bounds.check_json):
        try:
            check(data, "body", 20)
        except DecodeError:
            continue


def test_text_full_of_marks_is_one_value() -> None:
    text = '[{"a": 1},\\"\n' * 80_000
    assert codec.from_json(json.dumps({"content": text}).encode(), max_objects=3) == {"content": text}
    assert codec.unpack(codec.pack({"content": text}), max_objects=3) == {"content": text}


def test_arrays_are_one_value_each() -> None:
    body = {"input_ids": np.arange(200_000, dtype=np.int32)}
    assert len(codec.unpack(codec.pack(body), max_objects=3)["input_ids"]) == 200_000
    assert len(codec.from_json(json.dumps(list(range(60_000))).encode())) == 60_000


async def test_large_bodies_are_decoded_beside_the_loop_and_small_ones_on_it() -> None:
    here = threading.current_thread()
    assert await offload.by_size(100, threading.current_thread) is here
    assert await offload.by_size(offload.LARGE + 1, threading.current_thread) is not here
