"""Rules that reject whole groups: pure functions of a group, used by orchestrator and trainer.

Names and meaning are those of slime and of dynamic sampling (DAPO, arXiv:2503.14476, section 3.2). A rule returns the
reason, for users, to reject a group, and None to keep it. It is asked about the episodes in the loss: see `of_trained`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shared.seats import of_each_seat
from shared.types import Group

type GroupRule = Callable[[Group], str | None]

_EQUAL = 1e-12
"""Relative difference up to which rewards are equal: the rounding error of sums of some thousand terms."""


def are_equal(values: np.ndarray) -> bool:
    """True if finite float64 numbers [N], N > 0, are equal up to rounding."""
    with np.errstate(over="ignore"):  # a difference that overflows is not equal
        return float(np.ptp(values)) <= _EQUAL * float(np.abs(values).max())


def in_loss(group: Group, *, mask_truncated: bool) -> Group:
    """Return the group without the episodes that are outside the loss; it may have none left."""
    if not mask_truncated:
        return group
    return replace(group, trajectories=tuple(t for t in group.trajectories if t.status != "truncated"))


def of_trained(rule: GroupRule, group: Group, *, mask_truncated: bool) -> str | None:
    """Apply a rule to the episodes of a group that are in the loss; reject a group without one."""
    kept = in_loss(group, mask_truncated=mask_truncated)
    if not kept.trajectories:
        return f"all {len(group.trajectories)} episodes are truncated, and algorithm.mask_truncated leaves them out"
    return rule(kept)


def rewards(group: Group) -> list[np.ndarray]:
    """Return the rewards of the episodes, float64 [G], or of each seat in the episodes where it moved."""
    return [np.array([one.reward for one in seat], np.float64) for seat in of_each_seat(group).values()]


def has_variance(group: Group) -> bool:
    """True if rewards of one seat differ by more than rounding; otherwise group-relative advantages are 0.

    Without seats, they are the rewards of the episodes.
    """
    return not all(map(are_equal, rewards(group)))


def zero_variance(group: Group) -> str | None:
    """Reject a group with equal rewards: its group-relative advantages are 0."""
    if has_variance(group):
        return None
    first = group.trajectories[0]
    of_seat = " of each seat are equal" if first.seats else f" are {first.reward:g}"
    return f"all {len(group.trajectories)} rewards{of_seat}"


def min_reward(group: Group, threshold: float) -> str | None:
    """Reject a group without a reward above the threshold, of an episode or of a seat."""
    best = max(float(one.max()) for one in rewards(group))
    return None if best > threshold else f"the best reward is {best:g}, not above {threshold:g}"


def response_diversity(group: Group, min_unique_ratio: float) -> str | None:
    """Reject a group if the share of different responses, by their sampled tokens, is below the ratio."""
    responses = {
        tuple(part.token_ids[part.loss_mask.astype(bool)].tobytes() for part in (one, *one.branches))
        for one in group.trajectories
    }
    n = len(group.trajectories)
    return None if len(responses) / n >= min_unique_ratio else f"{len(responses)} of {n} responses are different"


def reasonable_length(group: Group, min_tokens: int, max_tokens: int) -> str | None:
    """Reject a group whose mean number of sampled tokens per episode is outside the bounds."""
    mean = sum(one.n_sampled for one in group.trajectories) / len(group.trajectories)
    if min_tokens <= mean <= max_tokens:
        return None
    return f"{mean:g} tokens per episode, outside {min_tokens} to {max_tokens}"
