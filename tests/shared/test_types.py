"""Trajectory invariants and the wire record of a group."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import DecodeError
from shared.types import Group, Trajectory, Turn, VersionSpan, WeightVersion, spans


@st.composite
def trajectories(draw, ticket=7):
    """A conversation of alternating environment and sampled pieces, in arbitrary lengths and versions."""
    prompt = draw(st.integers(1, 8))
    mask, versions = [0] * prompt, []
    step = 0
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 6))):
            step += draw(st.integers(0, 1))
            versions.append((str(WeightVersion(1, step)), len(mask)))
            mask.append(1)
        mask += [0] * draw(st.integers(0, 3))
    loss_mask = np.array(mask, np.uint8)
    n = len(mask)
    logprobs = np.where(loss_mask, -np.abs(np.linspace(0.1, 3, n)), 0).astype(np.float32)
    teacher = draw(st.sampled_from([None, logprobs * 2]))
    return Trajectory(
        ticket, 0, 0, "env", "task", prompt, np.arange(n, dtype=np.int32), loss_mask, logprobs,
        spans([v for v, _ in versions], [p for _, p in versions]), (Turn(0, prompt, "user"),), 0.5, True, "completed",
        teacher_logprobs=teacher,
    )  # fmt: skip


@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_group_round_trip(members):
    group = Group(7, "env", "task", tuple(members))
    decoded = Group.decode(group.encode())
    for a, b in zip(decoded.trajectories, members, strict=True):
        for field in dataclasses.fields(Trajectory):
            left, right = getattr(a, field.name), getattr(b, field.name)
            assert np.array_equal(left, right) if isinstance(right, np.ndarray) else left == right


@given(trajectories(), st.data())
def test_every_broken_invariant_is_named(trajectory, data):
    n = len(trajectory.token_ids)
    sampled = np.flatnonzero(trajectory.loss_mask)
    flipped = trajectory.loss_mask.copy()
    flipped[data.draw(st.sampled_from(list(sampled)))] = 0
    nan = trajectory.logprobs.copy()
    nan[data.draw(st.integers(0, n - 1))] = np.nan
    broken = {
        "differ in length": {"token_ids": trajectory.token_ids[:-1]},
        "version spans do not cover|not sampled": {"loss_mask": flipped},
        "NaN or infinite": {"logprobs": nan},
        "do not cover": {"versions": trajectory.versions[1:]},
        "prompt_len": {"prompt_len": 0},
        "not ids": {"token_ids": -1 - trajectory.token_ids},
        "overlap": {"versions": (*trajectory.versions, trajectory.versions[0])},
        "outside the sequence": {"turns": (Turn(0, n + 1, "user"),)},
        "reward": {"reward": float("inf")},
        "positive": {"logprobs": np.where(trajectory.loss_mask, 1.0, 0).astype(np.float32)},
        "a teacher's log-probabilities differ in length": {"teacher_logprobs": trajectory.logprobs[1:]},
        "episode 0: a log-probability is NaN": {"teacher_logprobs": nan},
        "is positive": {"teacher_logprobs": np.where(trajectory.loss_mask, 1.0, 0).astype(np.float32)},
        "at a position that was not sampled": {"teacher_logprobs": np.full(n, -1.0, np.float32)},
    }
    for message, change in broken.items():
        with pytest.raises(DecodeError, match=message):
            dataclasses.replace(trajectory, **change).validate()


@given(trajectories())
def test_what_a_teacher_said_is_on_the_wire_only_where_one_was_asked(trajectory):
    shown = dataclasses.replace(trajectory, teacher_logprobs=trajectory.logprobs * 3)
    plain = dataclasses.replace(trajectory, teacher_logprobs=None)
    records = [codec.unpack(Group(7, "env", "task", (one,)).encode())["trajectories"][0] for one in (shown, plain)]
    assert records[0].keys() - records[1].keys() == {"teacher_logprobs"}
    assert np.array_equal(records[0]["teacher_logprobs"], shown.teacher_logprobs)
    for wrong in (None, 1.0, shown.token_ids, shown.logprobs.astype(np.float64)):
        record = codec.unpack(Group(7, "env", "task", (shown,)).encode())
        record["trajectories"][0]["teacher_logprobs"] = wrong
        with pytest.raises(DecodeError):
            Group.decode(codec.pack(record))


@given(trajectories(), st.data())
def test_mutated_bytes_decode_cleanly_or_not_at_all(trajectory, data):
    encoded = bytearray(Group(7, "env", "task", (trajectory,)).encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        Group.decode(bytes(encoded)).validate()


def test_a_failed_group_has_no_trajectories():
    assert Group.decode(Group(3, "e", "t", (), "ServiceUnreachable").encode()).failure == "ServiceUnreachable"
    with pytest.raises(DecodeError):
        Group(3, "e", "t", ()).validate()


def test_spans_split_at_gaps_and_versions():
    assert spans(["a", "a", "b", "b"], [1, 2, 3, 5]) == (
        VersionSpan("a", 1, 3),
        VersionSpan("b", 3, 4),
        VersionSpan("b", 5, 6),
    )


def test_versions_order_by_epoch_then_step():
    assert WeightVersion.parse("e000002-s000001") > WeightVersion.parse("e000001-s000009")
    assert str(WeightVersion.parse("e000002-s000001")) == "e000002-s000001"
    for text in ("", "e1-s1", "e000001-s000001/..", "e000001-s000001\n"):
        with pytest.raises(DecodeError):
            WeightVersion.parse(text)


def test_an_error_does_not_send_a_long_version_back():
    with pytest.raises(DecodeError) as caught:
        WeightVersion.parse("e" * 2**20)
    assert len(str(caught.value)) < 200
