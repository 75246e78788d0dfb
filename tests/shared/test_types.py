"""Trajectory invariants and the wire record of a group."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import DecodeError
from shared.sequences import spans
from shared.types import MAX_BRANCHES, MAX_TREE_TOKENS, Branch, Group, Trajectory, Turn, VersionSpan, WeightVersion

RECORDED = Path(__file__).parents[1] / "fixtures/groups/single_sequences.msgpack"


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


@st.composite
def trees(draw):
    """An episode whose branches begin anywhere in an earlier sequence, or by themselves."""
    trajectory, branches = draw(trajectories()), []
    for _ in range(draw(st.integers(1, 4))):
        lengths = dataclasses.replace(trajectory, branches=tuple(branches)).lengths()
        parent = draw(st.integers(-1, len(branches)))
        shared = draw(st.integers(1, lengths[parent])) if parent >= 0 else 0
        mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)) + [1]
        mask[0] *= shared > 0
        at = [shared + i for i, sampled in enumerate(mask) if sampled]
        logprobs = np.where(mask, -0.5, 0).astype(np.float32)
        branches.append(
            Branch(
                parent, shared, np.arange(len(mask), dtype=np.int32) + 100 * len(branches), np.array(mask, np.uint8),
                logprobs, spans(["e000001-s000003"] * len(at), at), (Turn(shared, shared + 1, "assistant", 0.25),),
                teacher_logprobs=None if trajectory.teacher_logprobs is None else logprobs * 2,
            )
        )  # fmt: skip
    return dataclasses.replace(trajectory, branches=tuple(branches))


def equal(left, right):
    if dataclasses.is_dataclass(right):
        return all(equal(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(right))
    if isinstance(right, tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return np.array_equal(left, right) if isinstance(right, np.ndarray) else left == right


@given(st.lists(trajectories() | trees(), min_size=1, max_size=3))
def test_group_round_trip(members):
    group = Group(7, "env", "task", tuple(members))
    decoded = Group.decode(group.encode())
    assert all(equal(a, b) for a, b in zip(decoded.trajectories, members, strict=True))
    assert decoded.encode() == group.encode()


def test_a_group_recorded_before_branches_decodes_to_the_same_bytes():
    payload = RECORDED.read_bytes()
    group = Group.decode(payload)
    assert [one.branches for one in group.trajectories] == [()] * 3
    assert group.encode() == payload
    assert equal(group.trajectories[2].sequences()[0].routed_experts, group.trajectories[2].routed_experts)


@given(trees())
def test_each_sampled_token_of_a_tree_is_in_one_sequence(tree):
    sequences = tree.sequences()
    assert [len(one.token_ids) for one in sequences] == tree.lengths()
    assert sum(one.n_sampled for one in sequences) == tree.n_sampled
    assert tree.oldest() == min(WeightVersion.parse(s.version) for one in sequences for s in one.versions)
    stored, owners = {}, []
    for number, (one, own) in enumerate(zip(sequences, (tree, *tree.branches), strict=True)):
        parent = owners[own.parent][: own.shared] if number and own.parent >= 0 else []
        owners.append(parent + [(number, i) for i in range(len(own.token_ids))])
        assert not one.loss_mask[: one.shared].any()
        assert not one.logprobs[one.loss_mask == 0].any()
        for key, token in zip(owners[-1], one.token_ids, strict=True):
            assert stored.setdefault(key, token) == token
    assert len(stored) == tree.n_stored


@given(trees(), st.data())
def test_every_broken_invariant_of_a_branch_is_named(tree, data):
    at = data.draw(st.integers(0, len(tree.branches) - 1))
    branch, n_before = tree.branches[at], tree.lengths()
    end = n_before[at + 1]
    flipped = branch.loss_mask.copy()
    flipped[-1] = 0
    first = Branch(-1, 0, *(x[-1:] for x in (branch.token_ids, branch.loss_mask, branch.logprobs)),
                   (VersionSpan("e000001-s000003", 0, 1),), (), None if branch.teacher_logprobs is None else
                   branch.teacher_logprobs[-1:])  # fmt: skip
    silent = {"loss_mask": branch.loss_mask * 0, "logprobs": branch.logprobs * 0, "versions": ()}
    if branch.teacher_logprobs is not None:
        silent["teacher_logprobs"] = branch.logprobs * 0
    other = None if branch.teacher_logprobs is not None else branch.logprobs
    broken = {
        "before its parent": {"parent": at + 1},
        "before its parent|shares more": {"parent": -2},
        "shares more tokens than": {"shared": max(n_before) + 1},
        "shares no token": {"parent": 0, "shared": 0},
        "no sampled token": silent,
        "differ in length": {"token_ids": branch.token_ids[1:]},
        "do not cover|not sampled": {"loss_mask": flipped},
        "empty or outside": {"versions": (VersionSpan("e000001-s000003", branch.shared - 1, branch.shared + 1),)},
        "overlap": {"versions": (*branch.versions, branch.versions[0])},
        "a turn lies outside": {"turns": (Turn(branch.shared, end + 1, "assistant"),)},
        "reward": {"turns": (Turn(branch.shared, end, "assistant", float("nan")),)},
        "some sequences": {"teacher_logprobs": other},
        "more positions": {"routed_experts": np.zeros((end + 1, 1, 2), np.uint8)},
        "first token": {f.name: getattr(first, f.name) for f in dataclasses.fields(first)},
    }
    for message, change in broken.items():
        branches = list(tree.branches)
        branches[at] = dataclasses.replace(branch, **change)
        with pytest.raises(DecodeError, match=message):
            dataclasses.replace(tree, branches=tuple(branches[: at + 1])).validate()


@given(trees())
def test_the_number_of_branches_and_tokens_is_bounded(tree):
    with pytest.raises(DecodeError, match=str(MAX_BRANCHES)):
        dataclasses.replace(tree, branches=tree.branches[:1] * (MAX_BRANCHES + 1)).validate()
    long = dataclasses.replace(tree.branches[0], parent=0, shared=MAX_TREE_TOKENS)
    with pytest.raises(DecodeError, match=str(MAX_TREE_TOKENS)):
        dataclasses.replace(tree, branches=(long,)).validate()


def test_experts_of_a_branch_continue_those_of_its_parent():
    episode = Group.decode(RECORDED.read_bytes()).trajectories[2]
    n = len(episode.routed_experts)
    own = np.full((2, 2, 3), 9, np.uint8)
    branch = Branch(
        0, n + 1, np.array([5, 6], np.int32), np.array([0, 1], np.uint8), np.array([0, -1], np.float32),
        (VersionSpan("e000001-s000003", n + 2, n + 3),), (), routed_experts=own,
    )  # fmt: skip
    tree = dataclasses.replace(episode, branches=(branch, dataclasses.replace(branch, routed_experts=None)))
    tree.validate()
    joined = tree.sequences()[1].routed_experts
    assert np.array_equal(joined[:n], episode.routed_experts)
    assert np.array_equal(joined[n:], own)
    assert np.array_equal(tree.sequences()[2].routed_experts, episode.routed_experts)
    for wrong in (own[..., :2], own.astype(np.uint16), np.zeros((4, 2, 3), np.uint8)):
        with pytest.raises(DecodeError, match="experts of"):
            dataclasses.replace(tree, branches=(dataclasses.replace(branch, routed_experts=wrong),)).validate()


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


@given(trajectories() | trees(), st.data())
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
