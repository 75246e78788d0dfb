"""Rules by which a group that can be read is not trained on: each is a function of the group alone, or of the group and
the present weights, so that whoever decides again decides the same.

A filtered group is void: another ticket takes its place, so a step has always its number of groups. (DAPO calls this
*dynamic sampling*, arXiv:2503.14476, section 3.2.) What can never be trained on is found when a group is decoded:
shared.types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.algorithms.terms.advantages import are_equal
from shared.outcomes import FILTERS, FilterRule
from shared.types import Group

type GroupRule = Callable[[Group], str | None]
"""Why the group is not trained on, for people; None if it is."""


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """`rules` are names of `GROUP_RULES`. `max_logprob_diff` in nats, None for no such rule. `max_num_gen_batches`: for
    one step so many times its number of groups may be filtered, then the run stops.
    """

    rules: tuple[FilterRule, ...] = ()
    max_logprob_diff: float | None = None
    max_num_gen_batches: int = 10


NO_FILTERS = FilterOptions()


def has_variance(group: Group) -> bool:
    """Whether the rewards of its episodes differ by more than rounding: only then do group-relative advantages."""
    return not are_equal(np.array([one.reward for one in group.trajectories], np.float64))


def zero_variance(group: Group) -> str | None:
    """Its episodes all did equally well: group-relative advantages are 0, and there is nothing to learn."""
    if has_variance(group):
        return None
    return f"all {len(group.trajectories)} rewards are {group.trajectories[0].reward:g}"


GROUP_RULES: Mapping[FilterRule, GroupRule] = {"zero_variance": zero_variance}


def verdict(group: Group, rules: Sequence[FilterRule]) -> tuple[FilterRule, str] | None:
    """The first rule that the group is filtered by, and why; None if none is."""
    for rule in rules:
        why = GROUP_RULES[rule](group)
        if why is not None:
            return rule, why
    return None


def shares_without_variance(groups: Sequence[Group]) -> dict[str, float]:
    """`zero_variance_groups` and `zero_variance_tokens` of a step: the shares of its groups, and of its sampled tokens,
    whose group has rewards without variance.
    """
    tokens = [sum(one.n_sampled for one in group.trajectories) for group in groups]
    flat = [not has_variance(group) for group in groups]
    n_flat = sum(n for n, is_flat in zip(tokens, flat, strict=True) if is_flat)
    return {"zero_variance_groups": sum(flat) / len(groups), "zero_variance_tokens": n_flat / sum(tokens)}


ADVICE: Mapping[FilterRule, str] = {
    "zero_variance": "the tasks are too easy or too hard for the model: choose others, set"
    " trainer.filters.zero_variance=false, or raise trainer.filters.max_num_gen_batches",
    "logprob": "a rollout server computes with other weights, or in another way, than the trainer: restart it, or raise"
    " trainer.filters.logprob",
}
_DEFECT = "what makes these groups is at fault; Redis keeps the newest of them, and the log names each"


def starved(n_filtered: Mapping[FilterRule, int], step: int) -> str:
    """For people, on one line: why no group was left for a step, and what can be done."""
    most = max(n_filtered, key=lambda rule: n_filtered[rule])
    counts = ", ".join(f"{n} by {rule} ({FILTERS[rule]})" for rule, n in sorted(n_filtered.items()))
    return (
        f"step {step} has no groups: {sum(n_filtered.values())} were filtered since the last step, {counts}."
        f" Most likely {ADVICE.get(most, _DEFECT)}. Then continue the run"
    )
