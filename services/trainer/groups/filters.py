"""Filters: rules that exclude valid groups from training.

Each is a pure function of the group, or of the group and the present weights, so a replayed decision is the same.

A filtered group is void: another ticket replaces it, so a step always has its number of groups (*dynamic sampling* in
DAPO, arXiv:2503.14476, section 3.2). Groups that can never be trained on are found when they are decoded: see
shared.types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from services.trainer.algorithms.terms.added import added_terms
from shared.group_rules import GroupRule, has_variance, in_loss, of_trained, zero_variance
from shared.outcomes import DEFECTS, FILTERS, FilterRule
from shared.types import Group


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Options of the filters.

    `rules` are names of `GROUP_RULES`. `max_logprob_diff` is in nats; None disables that filter. The run stops if
    `max_num_gen_batches` times a step's number of groups are filtered before it. With `mask_truncated`, truncated
    episodes are outside the loss, and rules do not look at them. `custom` is the text of the user's own rule.
    """

    rules: tuple[FilterRule, ...] = ()
    max_logprob_diff: float | None = None
    max_num_gen_batches: int = 10
    mask_truncated: bool = False
    custom: str | None = None


NO_FILTERS = FilterOptions()


GROUP_RULES: Mapping[FilterRule, GroupRule] = {"zero_variance": zero_variance}


def verdict(group: Group, filters: FilterOptions) -> tuple[FilterRule, str] | None:
    """Return the first rule that excludes the group, and the reason; None if none does. Raises RuleFailed."""
    rules = {rule: GROUP_RULES[rule] for rule in filters.rules}
    if filters.custom is not None:
        rules["custom"] = _own(filters.custom)
    for rule, of_group in rules.items():
        why = of_trained(of_group, group, mask_truncated=filters.mask_truncated)
        if why is not None:
            return rule, why
    return None


@cache
def _own(value: str) -> GroupRule:
    """Return the rule of a configuration's text, which raises RuleFailed."""
    return added_terms().group_filter(value)


def shares_without_variance(groups: Sequence[Group], *, mask_truncated: bool) -> dict[str, float]:
    """Measure `zero_variance_groups` and `zero_variance_tokens` of a step.

    They are the shares of its groups, and of its sampled tokens, whose group has equal rewards in the loss.
    """
    tokens = [sum(one.n_sampled for one in group.trajectories) for group in groups]
    flat = [not has_variance(in_loss(group, mask_truncated=mask_truncated)) for group in groups]
    n_flat = sum(n for n, is_flat in zip(tokens, flat, strict=True) if is_flat)
    return {"zero_variance_groups": sum(flat) / len(groups), "zero_variance_tokens": n_flat / sum(tokens)}


ADVICE: Mapping[FilterRule, str] = {
    "zero_variance": "the tasks are too easy or too hard for the model: choose others, set"
    " trainer.filters.zero_variance=false, or raise trainer.filters.max_num_gen_batches",
    "logprob": "a rollout server has other weights than the trainer, or computes otherwise: restart it, or raise"
    " trainer.filters.logprob",
    "custom": "the rule of trainer.filters.custom is too strict for this model and its tasks: choose other tasks, raise"
    " trainer.filters.max_num_gen_batches, or use another rule in a `volley fork`",
}
_POLICY = (
    "orchestrator.generation is too strict for this model and its tasks: relax it, or raise"
    " trainer.filters.max_num_gen_batches"
)
_DEFECT = "the producer of these groups is faulty: see the log, which names each, and Redis, which keeps the newest"


def starved(n_filtered: Mapping[FilterRule, int], step: int) -> str:
    """Message for users, on one line: why no group is left for a step, and what to do."""
    most = max(n_filtered, key=lambda rule: n_filtered[rule])
    counts = ", ".join(f"{n} by {rule} ({FILTERS[rule]})" for rule, n in sorted(n_filtered.items()))
    advice = ADVICE.get(most, _DEFECT if most in DEFECTS else _POLICY)
    return (
        f"step {step} has no groups: {sum(n_filtered.values())} were filtered since the last step, {counts}."
        f" Most likely {advice}. Then continue the run"
    )
