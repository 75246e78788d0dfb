"""Seats of an episode: the players of a game, each with its own conversation and its own reward.

An episode with seats names one for each of its sequences (`Trajectory.seats`). As a trajectory of its own, a seat has
its sequences alone, and the rewards of its turns add up to its reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shared.types import Branch, Group, Trajectory


def by_seat(trajectory: Trajectory) -> dict[str, Trajectory]:
    """Return the trajectory of each seat, in the order of `seats`; of an episode without seats, itself under ""."""
    if not trajectory.seats:
        return {"": trajectory}
    return {seat: _of_seat(trajectory, numbers) for seat, numbers in sequences_of(trajectory).items()}


def sequences_of(trajectory: Trajectory) -> dict[str, list[int]]:
    """Return the numbers of each seat's sequences; of an episode without seats, all under ""."""
    found: dict[str, list[int]] = {}
    for number in range(1 + len(trajectory.branches)):
        found.setdefault(trajectory.seats[number] if trajectory.seats else "", []).append(number)
    return found


def of_each_seat(group: Group) -> dict[str, list[Trajectory]]:
    """Return the trajectories of each seat, of the episodes in which it moved; without seats, all under ""."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        for seat, one in by_seat(trajectory).items():
            found.setdefault(seat, []).append(one)
    return found


def joined(seats: Mapping[str, Trajectory]) -> Trajectory:
    """Make one episode of its seats' trajectories; the rewards, components and faults are their sums."""
    (_, first), *others = seats.items()
    branches, names = list(first.branches), [next(iter(seats))] * (1 + len(first.branches))
    components, faults = Counter(first.reward_components), Counter(first.faults)
    for seat, one in others:
        start = 1 + len(branches)
        own = Branch(-1, 0, *(getattr(one, name) for name in _STORED))
        later = (replace(b, parent=b.parent + start if b.parent >= 0 else -1) for b in one.branches)
        branches += [own, *later]
        names += [seat] * (1 + len(one.branches))
        components.update(one.reward_components)
        faults.update(one.faults)
    return replace(
        first,
        branches=tuple(branches),
        seats=tuple(names),
        reward=sum(one.reward for one in seats.values()),
        reward_components=dict(components),
        faults=dict(faults),
    )


_STORED = ("token_ids", "loss_mask", "logprobs", "versions", "turns", "teacher_logprobs", "routed_experts")


def _of_seat(trajectory: Trajectory, numbers: list[int]) -> Trajectory:
    """Return the sequences of these numbers as a trajectory, whose success is a reward above 0."""
    stored = [(trajectory, *trajectory.branches)[number] for number in numbers]
    first, place = stored[0], {-1: -1, **{number: i for i, number in enumerate(numbers)}}
    reward = float(sum(turn.reward for one in stored for turn in one.turns))
    return replace(
        trajectory,
        **{name: getattr(first, name) for name in _STORED},
        prompt_len=int(np.argmax(first.loss_mask)),
        branches=tuple(replace(b, parent=place[b.parent]) for b in stored[1:] if isinstance(b, Branch)),
        seats=tuple(trajectory.seats[number] for number in numbers),
        reward=reward,
        success=reward > 0,
    )
