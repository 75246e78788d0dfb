"""Decide on complete groups: filters by name and import path, and the selection among several groups.

Invariant: every decision is a group under its own ticket, so the ticket ends in exactly one disposition: a rejected
group is sent without trajectories and with its rule, and the trainer ends its ticket as `filtered(rule)`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from services.orchestrator.schedule.cohorts import Cohort
from services.orchestrator.schedule.filters import GroupFilter, group_filters
from shared.errors import ConfigError
from shared.generation_schema import GenerationSection
from shared.group_rules import rewards
from shared.outcomes import FilterRule
from shared.types import Group

_KEY = "orchestrator.generation"


@dataclass(frozen=True, slots=True)
class Selection:
    """Keeps the share `ratio` of `n` groups, by the standard deviation of their rewards (GRL's rollout filter)."""

    n: int
    ratio: float
    kind: Literal["std", "std_rev"]

    def why(self, group: Group, among: Sequence[Group]) -> str | None:
        """Return the reason to reject the group, None to keep it. Of equal groups the lower ticket is kept."""
        sign = -1.0 if self.kind == "std" else 1.0
        ranked = sorted(among, key=lambda one: (sign * float(rewards(one).std()), one.ticket))
        n_kept = max(1, int(self.ratio * len(ranked)))
        place = ranked.index(group)
        if place < n_kept:
            return None
        std = float(rewards(group).std())
        return f"place {place + 1} of {len(ranked)} by {self.kind} of the rewards ({std:g}), {n_kept} are kept"


def selection(config: GenerationSection, groups_per_step: int) -> Selection | None:
    """Return the selection of a run, if it has one."""
    filters = config.filters
    if filters.rollout_filter_ratio is None:
        return None
    n = math.ceil(groups_per_step / filters.rollout_filter_ratio - 1e-9)
    return Selection(n, filters.rollout_filter_ratio, filters.rollout_filter_type)


def check(config: GenerationSection, groups_per_step: int, max_staleness: int, n_groups: int) -> None:
    """Raise ConfigError for a policy that these limits defeat. Args: n_groups: groups that can run at once."""
    factor = config.over_sampling_factor
    if factor is not None and math.ceil(factor) - 1 > max_staleness:
        raise ConfigError(
            f"{_KEY}.over_sampling_factor={factor:g} would leave finished groups that are stale when they are trained",
            f"set grpo_config.off_policy_steps to {math.ceil(factor) - 1} or more, or lower the factor",
        )
    chosen = selection(config, groups_per_step)
    if chosen is None:
        return
    ahead = (max_staleness + 1) * groups_per_step
    if factor is not None:
        ahead = min(ahead, started_ahead(factor, groups_per_step))
    if chosen.n > ahead:
        raise ConfigError(
            f"{_KEY}.filters.rollout_filter_ratio={chosen.ratio:g} compares {chosen.n} groups, but only {ahead} may be"
            " on their way at once",
            f"set grpo_config.off_policy_steps to {math.ceil(chosen.n / groups_per_step) - 1} or more (and"
            " over_sampling_factor, if set, to that plus 1)",
        )
    if chosen.n > n_groups:
        raise ConfigError(
            f"{_KEY}.filters.rollout_filter_ratio={chosen.ratio:g} compares {chosen.n} groups, but"
            f" only {n_groups} run at once",
            "raise orchestrator.max_concurrent_episodes",
        )


def started_ahead(factor: float, groups_per_step: int) -> int:
    """Return the largest number of groups beyond the durable steps."""
    return math.ceil(factor * groups_per_step - 1e-9)


class GenerationPolicy:
    """Filters and selection of one run. Raises ConfigError for a filter that cannot be imported."""

    def __init__(self, config: GenerationSection | None = None, groups_per_step: int = 1) -> None:
        config = config or GenerationSection()
        self._filters: tuple[GroupFilter, ...] = group_filters(config.filters)
        self._selection = selection(config, groups_per_step)
        self._cohort = Cohort[Group](self._selection.n) if self._selection else None

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Count a ticket as undecided."""
        if self._cohort is None:
            yield
            return
        with self._cohort.ticket():
            yield

    def starved(self, is_starved: bool) -> None:
        """Set if no further ticket can be had now: selections are then made among those in hand."""
        if self._cohort is not None:
            self._cohort.starved(is_starved)

    @property
    def has_waiting(self) -> bool:
        """True if groups wait for a decision."""
        return self._cohort is not None and self._cohort.n_waiting > 0

    async def judged(self, group: Group) -> Group:
        """Return the group, or its rejection. Raises VolleyError if a function of the user fails."""
        if group.failure is not None:
            return group
        for one in self._filters:
            if (why := await asyncio.to_thread(one.why, group)) is not None:
                return rejected(group, one.rule, why)
        if self._selection is not None and self._cohort is not None:
            among = await self._cohort.join(group)
            if (why := self._selection.why(group, among)) is not None:
                return rejected(group, "rollout_filter_ratio", why)
        return group


def rejected(group: Group, rule: FilterRule, why: str) -> Group:
    """Return what is sent instead of a group."""
    return Group(group.ticket, group.env, group.task, (), failure=why, rule=rule)
