"""Seats of an episode on the wire, apart and joined again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.errors import DecodeError
from shared.group_rules import has_variance, min_reward, zero_variance
from shared.seats import by_seat, joined
from shared.types import Branch, Group, Trajectory, Turn, VersionSpan

VERSION = "e000001-s000003"


def alone(reward: float, start: int = 10, **changed) -> Trajectory:
    """A trajectory of one seat: a prompt of three tokens, two sampled ones, and a branch of one after the prompt."""
    branch = Branch(
        parent=0,
        shared=3,
        token_ids=np.array([start + 7, start + 8], np.int32),
        loss_mask=np.array([0, 1], np.uint8),
        logprobs=np.array([0, -0.25], np.float32),
        versions=(VersionSpan(VERSION, 4, 5),),
        turns=(Turn(3, 4, "history"), Turn(4, 5, "assistant", reward)),
    )
    fields = {
        "ticket": 5,
        "sample_index": 1,
        "attempt": 0,
        "env": "nim",
        "task": "train/4",
        "prompt_len": 3,
        "token_ids": np.arange(start, start + 5, dtype=np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1], np.uint8),
        "logprobs": np.array([0, 0, 0, -0.5, -1.5], np.float32),
        "versions": (VersionSpan(VERSION, 3, 5),),
        "turns": (Turn(0, 3, "prompt"), Turn(3, 5, "assistant", 0.0)),
        "reward": reward,
        "success": reward > 0,
        "status": "completed",
        "branches": (branch,),
    }
    return Trajectory(**{**fields, **changed})


def game(x: float = 1.0, o: float = -1.0) -> Trajectory:
    """An episode of three seats."""
    faulty = alone(o, 30, faults={"format": 2}, reward_components={"o": o})
    return joined({"x": alone(x, reward_components={"x": x}), "o": faulty, "judge": alone(0.5, 50, branches=())})


def test_seats_are_joined_and_taken_apart_again() -> None:
    made = game()
    made.validate()
    assert made.seats == ("x", "x", "o", "o", "judge")
    assert [branch.parent for branch in made.branches] == [0, -1, 2, -1]
    assert (made.reward, made.faults, made.reward_components) == (0.5, {"format": 2}, {"x": 1.0, "o": -1.0})
    seats = by_seat(made)
    assert list(seats) == ["x", "o", "judge"]
    for (seat, one), was in zip(seats.items(), (alone(1.0), alone(-1.0, 30)), strict=False):
        one.validate()
        assert set(one.seats) == {seat}
        assert (one.reward, one.success, one.prompt_len) == (was.reward, was.reward > 0, 3)
        for mine, other in zip(one.sequences(), was.sequences(), strict=True):
            assert mine.token_ids.tolist() == other.token_ids.tolist()
            assert mine.logprobs.tolist() == other.logprobs.tolist()
            assert (mine.parent, mine.shared, mine.turns) == (other.parent, other.shared, other.turns)


def test_an_episode_without_seats_is_itself() -> None:
    one = alone(1.0)
    assert by_seat(one) == {"": one}
    assert b"seats" not in Group(5, "nim", "train/4", (one,)).encode()


def test_seats_survive_the_wire() -> None:
    made = game()
    (found,) = Group.decode(Group(5, "nim", "train/4", (made,)).encode()).trajectories
    assert found.seats == made.seats
    assert by_seat(found)["o"].token_ids.tolist() == by_seat(made)["o"].token_ids.tolist()


@pytest.mark.parametrize(
    ("seats", "why"),
    [
        (("x", "x", "o", "o"), "lacks the seat of a sequence"),
        (("x", "x", "o", "x", "judge"), "continues a sequence of another seat"),
        (("x", "x", "o", "o", ""), "has no name"),
        (("x", "x", "o", "o", "a\nb"), "has no name"),
        (("x", "x", "o", "o", "j" * 65), "has no name"),
    ],
)
def test_wrong_seats_are_no_group(seats: tuple[str, ...], why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        Group.decode(Group(5, "nim", "train/4", (replace(game(), seats=seats),)).encode())


def test_seats_that_are_no_texts_are_no_group() -> None:
    payload = Group(5, "nim", "train/4", (game(),)).encode()
    with pytest.raises(DecodeError, match="mistypes"):
        Group.decode(payload.replace(b"\xa5judge", b"\xc4\x04judg"))


def test_filters_compare_each_seat_with_itself() -> None:
    """The rewards of a zero-sum game add up to 0 in every episode."""
    mixed, equal = (Group(5, "nim", "train/4", (game(), game(*other))) for other in ((-1.0, 1.0), (1.0, -1.0)))
    assert has_variance(mixed)
    assert zero_variance(mixed) is None
    assert zero_variance(equal) == "all 2 rewards of each seat are equal"
    assert min_reward(mixed, 0.9) is None
    assert min_reward(mixed, 1.0) == "the best reward is 1, not above 1"
