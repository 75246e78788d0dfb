"""Experts on the wire: they come back as they were, dense groups are what they always were, and what is hostile is
named.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from shared import codec
from shared.errors import DecodeError
from shared.routing import RoutingShape
from shared.types import Group, Trajectory
from tests.fuzz.test_msgpack import trajectory

DENSE = Group(3, "frozen_lake", "train/7", (trajectory(0),))
OF_DENSE = "d67f3e2f6ce73ebf02d06287d018dc40325d7fbcb4e1c041bb54bcf157b3e4cb"
ROUTED = np.arange(11 * 2 * 3).reshape(11, 2, 3)


def of_experts(routed: np.ndarray) -> Group:
    return dataclasses.replace(DENSE, trajectories=(dataclasses.replace(trajectory(0), routed_experts=routed),))


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
@pytest.mark.parametrize("n", [0, 5, 11])
def test_experts_come_back_as_they_were(dtype: str, n: int) -> None:
    sent = of_experts(ROUTED[:n].astype(dtype))
    (found,) = Group.decode(sent.encode()).trajectories
    assert found.routed_experts is not None
    assert (found.routed_experts.dtype, found.routed_experts.shape) == (np.dtype(dtype), (n, 2, 3))
    np.testing.assert_array_equal(found.routed_experts, ROUTED[:n])
    assert Group.decode(sent.encode()).encode() == sent.encode()


def test_groups_without_experts_are_byte_for_byte_what_they_were() -> None:
    """The digest is that of the code before there were experts."""
    assert hashlib.sha256(DENSE.encode()).hexdigest() == OF_DENSE
    assert Group.decode(DENSE.encode()).trajectories[0].routed_experts is None


FLAT = ROUTED.astype("u1").reshape(-1)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        7,
        FLAT,
        {"shape": [11, 2, 3]},
        {"ids": FLAT},
        {"shape": [11, 2, 4], "ids": FLAT},
        {"shape": [66], "ids": FLAT},
        {"shape": [11, 2, 3, 1], "ids": FLAT},
        {"shape": [-11, -2, 3], "ids": FLAT},
        {"shape": [11.0, 2, 3], "ids": FLAT},
        {"shape": [11, 2, True], "ids": FLAT},
        {"shape": [0, 2**63, 2**64 - 1], "ids": FLAT[:0]},
        {"shape": "abc", "ids": FLAT},
        {"shape": [11, 2, 3], "ids": FLAT.tolist()},
        {"shape": [11, 2, 3], "ids": FLAT.astype("i4")},
        {"shape": [22, 1, 3], "ids": FLAT},
    ],
)
def test_what_are_no_experts_of_these_tokens_is_no_group(wrong: Any) -> None:
    record = codec.unpack(DENSE.encode())
    record["trajectories"][0]["routed_experts"] = wrong
    with pytest.raises(DecodeError):
        Group.decode(codec.pack(record))


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (RoutingShape(3, 66, 3), "experts of 2 layers, 3 a token, where the model has 3 and 3"),
        (RoutingShape(2, 66, 2), "where the model has 2 and 2"),
        (RoutingShape(2, 65, 3), "expert 65 of a model with 65"),
    ],
)
def test_experts_of_another_model_are_named(shape: RoutingShape, named: str) -> None:
    RoutingShape(2, 66, 3).check(FLAT.reshape(11, 2, 3))
    with pytest.raises(DecodeError, match=named):
        shape.check(FLAT.reshape(11, 2, 3))


def test_one_expert_twice_is_named() -> None:
    twice = FLAT.reshape(11, 2, 3).copy()
    twice[4, 1] = [2, 9, 2]
    with pytest.raises(DecodeError, match="the same expert twice"):
        RoutingShape(2, 66, 3).check(twice)


def test_the_smallest_dtype_that_holds_every_expert() -> None:
    assert [RoutingShape(1, n, 1).dtype for n in (8, 256, 257, 2**16)] == [
        np.dtype(d) for d in ("u1", "u1", "<u2", "<u2")
    ]


def test_a_trajectory_has_experts_of_no_more_positions_than_it_has() -> None:
    one: Trajectory = trajectory(0)
    n = len(one.token_ids)
    dataclasses.replace(one, routed_experts=np.zeros((n, 2, 3), np.uint8)).validate()
    with pytest.raises(DecodeError, match="more positions"):
        dataclasses.replace(one, routed_experts=np.zeros((n + 1, 2, 3), np.uint8)).validate()
