"""Filters of complete groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from shared.generation_schema import GenerationFilters
from shared.group_rules import GroupRule, min_reward, of_trained, reasonable_length, response_diversity, zero_variance
from shared.outcomes import FilterRule

_DIVERSE = 0.5
"""Share of different responses that slime's `quality_and_diversity` asks for."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A rule, and the name under which the ledger counts its groups."""

    rule: FilterRule
    why: GroupRule


def group_filters(config: GenerationFilters, mask_truncated: bool = False) -> tuple[GroupFilter, ...]:
    """Return the configured filters, of the episodes in the loss: `mask_truncated` leaves truncated ones out."""
    return tuple(replace(f, why=partial(of_trained, f.why, mask_truncated=mask_truncated)) for f in _rules(config))


def _rules(config: GenerationFilters) -> Iterator[GroupFilter]:
    if config.reward_nonzero_std or config.quality_and_diversity:
        yield GroupFilter("zero_variance", zero_variance)
    if config.min_reward is not None:
        yield GroupFilter("min_reward", partial(min_reward, threshold=config.min_reward))
    shares = [config.response_diversity or 0.0, _DIVERSE if config.quality_and_diversity else 0.0]
    if share := max(shares):
        yield GroupFilter("response_diversity", partial(response_diversity, min_unique_ratio=share))
    if config.reasonable_length is not None:
        low, high = config.reasonable_length
        yield GroupFilter("reasonable_length", partial(reasonable_length, min_tokens=low, max_tokens=high))
