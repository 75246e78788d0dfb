"""Rules of the user's own about a group, in numpy: called, and their results checked at every call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.trainer.algorithms.rules.inputs import GroupInputs
from shared.errors import RuleFailed
from shared.own_rules import OwnRule
from shared.rule_code import called

type AdvantageFunction = Callable[[GroupInputs], list[np.ndarray]]
type FilterFunction = Callable[[GroupInputs], bool]


def filter_of(rule: OwnRule) -> FilterFunction:
    """Return the filter, which is true for a group to keep; it raises RuleFailed."""

    def keeps(group: GroupInputs) -> bool:
        made = called(rule, group)
        if not isinstance(made, bool | np.bool_):
            raise RuleFailed(
                f"{rule} returned {type(made).__name__}", "return True to keep the group, and False to drop it"
            )
        return bool(made)

    return keeps


def advantage_of(rule: OwnRule) -> AdvantageFunction:
    """Return the advantages of a group, float64 [N] of each episode, not masked; they raise RuleFailed."""

    def advantages(group: GroupInputs) -> list[np.ndarray]:
        made, lengths = called(rule, group), [len(one.sampled) for one in group.episodes]
        try:
            arrays = [np.asarray(one, np.float64) for one in made]
        except (TypeError, ValueError) as error:
            raise RuleFailed(f"{rule} returned {type(made).__name__}: {error}", _WANTED) from error
        if len(arrays) != len(lengths):
            raise RuleFailed(f"{rule} returned {len(arrays)} advantages for {len(lengths)} episodes", _WANTED)
        for one, n in zip(arrays, lengths, strict=True):
            if one.shape not in ((), (n,)):
                raise RuleFailed(f"{rule} returned {list(one.shape)} for an episode of {n} tokens", _WANTED)
        whole = [np.broadcast_to(one, (n,)) for one, n in zip(arrays, lengths, strict=True)]
        if not all(np.isfinite(a[e.sampled]).all() for a, e in zip(whole, group.episodes, strict=True)):
            rewards = f"rewards {np.array2string(group.rewards, threshold=8, precision=4)}"
            raise RuleFailed(f"{rule} returned advantages that are not finite for {rewards}", _WANTED)
        return [np.where(e.sampled, a, 0.0) for a, e in zip(whole, group.episodes, strict=True)]

    return advantages


_WANTED = "return a finite number for each episode, [G], or an array [N] for each episode's tokens"
