"""Rules of the user's own about a group, in numpy: called, and their results checked at every call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.trainer.algorithms.terms.rewards import of_tokens
from shared.errors import RuleFailed
from shared.group_rules import GroupRule
from shared.own_rules import OwnRule
from shared.rule_code import called, read
from shared.seats import of_each_seat
from shared.types import Group
from volley_algorithms.rules.inputs import GroupInputs, group_inputs

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


def group_rule(value: str) -> GroupRule:
    """Return the filter of a configuration's text, which raises RuleFailed.

    It keeps the group of a game if the function keeps that of one seat.
    """
    rule = read(value)
    keeps = filter_of(rule)

    def why(group: Group) -> str | None:
        seats = of_each_seat(group).values()
        inputs = [group_inputs(seat, [of_tokens(one, "episode") for one in seat]) for seat in seats]
        return None if any(keeps(one) for one in inputs) else f"{rule} rejected it"

    return why


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
