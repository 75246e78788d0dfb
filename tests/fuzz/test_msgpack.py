"""The codec and the queue's records under mutated bytes: a value, or DecodeError, in memory that does not grow."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from shared import codec
from shared.errors import DecodeError
from shared.queue.records import StreamEntry
from shared.routing import RoutingShape
from shared.run.progress import TicketProgress
from shared.types import Branch, Group, Trajectory, Turn, VersionSpan, WeightVersion
from tests.fuzz.mutation import bombs, mutations

BODIES = [30_000, pytest.param(100_000, marks=pytest.mark.long)]
RECORDS = [6_000, pytest.param(20_000, marks=pytest.mark.long)]
_PAGE = 4096


def trajectory(sample_index: int, n: int = 12) -> Trajectory:
    mask = (np.arange(n) >= 4).astype(np.uint8)
    return Trajectory(
        ticket=3,
        sample_index=sample_index,
        attempt=0,
        env="frozen_lake",
        task="train/7@63bfb0362518",
        prompt_len=4,
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=(VersionSpan("e000001-s000003", 4, n),),
        turns=(Turn(0, 4, "user"), Turn(4, n, "assistant", 1.0)),
        reward=1.0,
        success=True,
        status="completed",
        reward_components={"success": 1.0},
        timings={"total_s": 0.5},
    )


SHOWN = dataclasses.replace(
    trajectory(1),
    teacher_logprobs=trajectory(1).logprobs * 2,
    routed_experts=np.tile(np.array([3, 0, 5], np.uint8), (5, 2, 1)),
)
BRANCH = Branch(
    0,
    6,
    np.arange(3, dtype=np.int32),
    np.array([0, 1, 1], np.uint8),
    np.array([0, -0.5, -1], np.float32),
    (VersionSpan("e000001-s000003", 7, 9),),
    (Turn(7, 9, "assistant"),),
)
TREE = dataclasses.replace(trajectory(2), branches=(BRANCH, dataclasses.replace(BRANCH, parent=1)))
GROUP = Group(3, "frozen_lake", "train/7@63bfb0362518", (trajectory(0), SHOWN, TREE))
CORPUS = [
    GROUP.encode(),
    Group(3, "frozen_lake", "train/7", (), "EpisodeTimeout").encode(),
    codec.pack(
        {"input_ids": np.arange(9, dtype=np.int32), "sampling_params": {"max_new_tokens": 5, "top_p": 0.5}, "rid": "a"}
    ),
    codec.pack(
        {
            "request_id": "r",
            "message": {"role": "assistant", "content": "<answer>Up</answer>", "tool_calls": [{"function": {}}]},
        }
    ),
]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    -(2**63),
    10**9,
    1.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "é" * 40,
    "12",
    b"",
    b"xyz",
]
ODD += [[], {}, [[]], {"a": 1}, {b"a": 1}]
ODD += [np.zeros(n, dtype) for n in (0, 1, 12) for dtype in ("i4", "f4", "u1", "i8", "f8", "u2")]


def clean(decode: Callable[[bytes], Any], body: bytes) -> Any:
    """What `decode` makes of it; None after a DecodeError. Any other exception fails the test."""
    try:
        return decode(body)
    except DecodeError:
        return None


def intake() -> GroupBuffer:
    rules = AdmissionRules("arrival", 1, longest=64, vocab_size=512, group_size=4, routing=RoutingShape(2, 6, 3))
    return GroupBuffer(TicketProgress(), [(1, 0)], rules)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE


@pytest.mark.parametrize("n_bodies", BODIES)
def test_mutated_bodies_are_values_or_decode_errors_and_leave_no_memory_behind(n_bodies: int) -> None:
    start, decoded = 0, 0
    for i, body in enumerate(mutations(CORPUS, n_bodies, seed=1)):
        clean(codec.unpack, body)
        decoded += clean(Group.decode, body) is not None
        if i == n_bodies // 10:
            gc.collect()
            start = rss()
    gc.collect()
    assert rss() - start < 8 * 2**20
    assert decoded > n_bodies // 500


def mutated_records(n: int, seed: int) -> Iterator[bytes]:
    """Groups in which one to three fields, at any depth, are replaced by something odd, or missing."""
    dice = random.Random(seed)
    for _ in range(n):
        record = codec.unpack(CORPUS[0])
        for _ in range(dice.randint(1, 3)):
            node, key = _field(record, dice)
            if dice.random() < 0.1:
                del node[key]
            else:
                node[key] = copy.deepcopy(dice.choice(ODD))
        yield codec.pack(record)


def _field(node: Any, dice: random.Random) -> tuple[Any, Any]:
    """A random place in the tree, as (container, key)."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = dice.choice(keys)
        child = node[key]
        if not isinstance(child, dict | list) or not child or dice.random() < 0.2:
            return node, key
        node = child


@pytest.mark.parametrize("n_records", RECORDS)
def test_a_group_that_decodes_can_be_trained_on_or_is_poison(n_records: int) -> None:
    """Whatever a record says, the trainer's intake takes it or ends its ticket; it never raises."""
    taken = 0
    for i, body in enumerate(mutated_records(n_records, seed=2)):
        group = clean(Group.decode, body)
        if group is not None:
            assert Group.decode(group.encode()).encode() == group.encode()
        taken += intake().offer(StreamEntry(f"{i}-0", 3, body, 1)) is None
    assert n_records // 100 < taken < n_records


def test_bombs_are_refused_in_little_memory() -> None:
    for name, body in bombs().items():
        tracemalloc.start()
        try:
            clean(codec.unpack, body)
            assert clean(Group.decode, body) is None, name
            assert tracemalloc.get_traced_memory()[1] < 64 * (len(body) + 2**16), name
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["array of 2^32", "arrays a million deep", "a map with a list for a key", "text that is no UTF-8"]
)
def test_what_is_no_value_is_a_decode_error(name: str) -> None:
    with pytest.raises(DecodeError):
        codec.unpack(bombs()[name])


def test_a_time_stamp_is_a_plain_number() -> None:
    assert codec.unpack(msgpack.packb(msgpack.Timestamp(5, 500_000_000))) == 5.5
    assert clean(codec.unpack, b"\xc7\x0c\xff" + b"\xff" * 12) is None


def test_numbers_that_are_none_are_no_group() -> None:
    record = codec.unpack(CORPUS[0])
    for value in (float("inf"), float("nan"), [], "x", None):
        assert clean(Group.decode, codec.pack({**record, "ticket": value})) is None


@pytest.mark.parametrize(
    "text", ["e٠٠٠٠٠١-s٠٠٠٠٠١", f"e{'9' * 5000}-s000001", "e000001-s000001\n", "e1-s1", "", " e000001-s000001"]
)
def test_a_version_has_one_spelling(text: str) -> None:
    with pytest.raises(DecodeError):
        WeightVersion.parse(text)
