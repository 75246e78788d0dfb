"""What comes out of a sandbox is read as a stranger's: right values become types, all others SandboxFailed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InputError, SandboxFailed
from shared.types import MAX_MESSAGE
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.process import frames

MESSAGE = {"role": "user", "content": "hi"}
INFO = {"reward_components": {"a": 0.5, "b": 0.5}, "success": True, "error": None, "extra": {"x": [1]}}
STEP = {"messages": [MESSAGE], "reward": 1.0, "terminated": False, "truncated": True, "info": INFO}
DESCRIPTION = {"protocol": "simple", "entry": "A", "splits": {"train": 3}, "tools": [{}], "has_demonstration": False}
OPENING = {"task": "train/0", "messages": [MESSAGE], "tools": []}
DEMONSTRATION = {
    "messages": [MESSAGE, {"role": "assistant", "content": "x", "tool_calls": [{}]}],
    "success": False,
    "tools": [],
}
SCRIPT = {"stdout": "", "stderr": "", "exit": 0, "cut": False}

READERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "description": (answers.read_description, DESCRIPTION),
    "opening": (answers.read_opening, OPENING),
    "step": (answers.read_step, STEP),
    "demonstration": (answers.read_demonstration, DEMONSTRATION),
    "script": (answers.read_script, SCRIPT),
    "task": (answers.read_task, "train/0"),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", READERS)
def test_right_values(name: str):
    read, value = READERS[name]
    read(value)


def test_a_step():
    result = answers.read_step(STEP)
    assert result.messages == (MESSAGE,)
    assert result.info.reward_components == {"a": 0.5, "b": 0.5}
    assert result.info.extra == {"x": [1]}
    assert result.over


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("step", {"reward": float("nan")}),
        ("step", {"reward": float("inf")}),
        ("step", {"reward": 1e7}),
        ("step", {"reward": 10**400}),
        ("step", {"reward": True}),
        ("step", {"reward": "1"}),
        ("step", {"reward": 2.0}),
        ("step", {"terminated": 1}),
        ("step", {"messages": [], "truncated": False}),
        ("step", {"messages": [MESSAGE] * 1001}),
        ("step", {"messages": [{**MESSAGE, "role": "root"}]}),
        ("step", {"messages": [{**MESSAGE, "role": ["user"]}]}),
        ("step", {"messages": [{**MESSAGE, "content": None}]}),
        ("step", {"messages": [{**MESSAGE, "content": "x" * (MAX_MESSAGE + 1)}]}),
        ("step", {"messages": [{**MESSAGE, "more": 1}]}),
        ("step", {"messages": [{**MESSAGE, "tool_calls": "x"}]}),
        ("step", {"info": {**INFO, "error": "mood"}}),
        ("step", {"info": {**INFO, "error": {}}}),
        ("step", {"info": {**INFO, "reward_components": {"a": float("nan")}}}),
        ("step", {"info": {**INFO, "reward_components": {"a\n": 1.0}}}),
        ("step", {"info": {**INFO, "extra": []}}),
        ("step", {"more": 1}),
        ("description", {"protocol": "pickle"}),
        ("description", {"protocol": []}),
        ("description", {"splits": {}}),
        ("description", {"splits": {"train": 0}}),
        ("description", {"splits": {"train": True}}),
        ("description", {"splits": {"train": 10**30}}),
        ("description", {"splits": {f"s{i}": 1 for i in range(17)}}),
        ("description", {"entry": "A" * 201}),
        ("description", {"tools": [1]}),
        ("opening", {"messages": []}),
        ("opening", {"task": "a\x1b[2J"}),
        ("opening", {"task": ""}),
        ("demonstration", {"messages": [MESSAGE]}),
        ("demonstration", {"messages": []}),
        ("script", {"exit": 256}),
        ("script", {"exit": -1}),
        ("script", {"stdout": None}),
    ],
)
def test_wrong_values(name: str, change: dict[str, Any]):
    read, value = READERS[name]
    with pytest.raises(SandboxFailed, match="which is not valid") as failed:
        read({**value, **change})
    assert failed.value.why == "protocol"
    assert len(failed.value.detail) < 300


@settings(max_examples=50)
@given(value=VALUES, name=st.sampled_from(sorted(READERS)), field=st.integers(0, 6))
def test_no_value_raises_anything_else(value: Any, name: str, field: int):
    read, right = READERS[name]
    for wrong in (value, {**right, sorted(right)[field % len(right)]: value} if isinstance(right, dict) else value):
        try:
            read(wrong)
        except SandboxFailed as failed:
            assert failed.why == "protocol"  # noqa: PT017


async def answered(data: bytes, number: int = 1, most: int = 10_000) -> Any:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await frames.read_answer(reader, number, most)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def test_frames():
    assert await answered(framed(b'{"id": 1, "result": [1]}')) == [1]
    with pytest.raises(SandboxFailed, match="hello") as failed:
        await answered(framed(b'{"id": 1, "error": {"why": "exception", "detail": "hello"}}'))
    assert failed.value.alive


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"id": 2, "result": 1}', "protocol"),
        (b'{"id": true, "result": 1}', "protocol"),
        (b'{"id": 1.0, "result": 1}', "protocol"),
        (b'{"id": 1}', "protocol"),
        (b'{"id": 1, "result": 1, "more": 2}', "protocol"),
        (b'{"id": 1, "error": {"why": "cpu", "detail": "I say so"}}', "protocol"),
        (b'{"id": 1, "error": {"why": "time", "detail": "I say so"}}', "protocol"),
        (b'{"id": 1, "error": {"why": 1, "detail": "x"}}', "protocol"),
        (b'{"id": 1, "error": "x"}', "protocol"),
        (b'{"id": 1, "result": NaN}', "protocol"),
        (b'{"id": 1, "result": "\xff"}', "protocol"),
        (b"[" * 5000, "protocol"),
        (b'{"id": 1, "result": [' + b"0," * 40_000 + b"0]}", "output"),
        (b'{"id": 1, "result": [' + b"{},{}," * 1600 + b"0]}" + b" " * 30_000, "output"),
        (b"", "protocol"),
        (b"x" * 10_001, "output"),
    ],
)
async def test_frames_that_are_no_answer(body: bytes, why: str):
    with pytest.raises(SandboxFailed) as failed:
        await answered(framed(body))
    assert failed.value.why == why
    assert not failed.value.alive


async def test_half_a_surrogate_pair_in_an_answer_is_replaced():
    body = rb'{"id": 1, "result": {"messages": "cut \ud83d", "tools": ["\udc00\ud83d\ude00"], "code": "\\ud83d"}}'
    found = await answered(framed(body))
    assert found == {"messages": "cut \ufffd", "tools": ["\ufffd\U0001f600"], "code": r"\ud83d"}


async def test_many_values_in_a_frame():
    with pytest.raises(SandboxFailed, match="more than 32768 values"):
        await answered(framed(b'{"id": 1, "result": [' + b"0," * 40_000 + b"0]}"), most=10**6)


async def test_the_end_of_the_channel():
    for data in (b"", b"\0\0", framed(b'{"id": 1, "result": 1}')[:-1]):
        with pytest.raises(asyncio.IncompleteReadError):
            await answered(data)


def test_requests():
    data = frames.encode(3, "step", {"x": "\u00e9"})
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert json.loads(data[4:]) == {"id": 3, "method": "step", "params": {"x": "\u00e9"}}
    with pytest.raises(InputError, match="are not JSON"):
        frames.encode(1, "step", {"x": "\ud800"})
    with pytest.raises(InputError, match="the request has"):
        frames.encode(1, "step", {"x": "x" * 2**25})
