"""Rounds, stragglers and filters: when groups are generated, and which complete groups are sent to the trainer.

Invariant: every decision is a group under its own ticket, so the ticket ends in exactly one disposition: a rejected
group is sent without trajectories and with its rule, and the trainer ends its ticket as `filtered(rule)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from services.orchestrator.schedule.policy import MakeGroup
from shared.generation_schema import GenerationSection, round_size
from shared.group_rules import in_loss, rewards
from shared.outcomes import FilterRule
from shared.types import Group
from volley_algorithms.generation.cohorts import Cohort
from volley_algorithms.generation.filters import GroupFilter, group_filters
from volley_algorithms.generation.rounds import Rounds
from volley_algorithms.generation.stragglers import Stragglers

_ROUNDING = 1e-9
"""Rounding error of products such as 0.29 * 100, which is a little below 29."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Keeps the share `ratio` of `n` groups, by the standard deviation of their rewards (GRL's rollout filter).

    With `mask_truncated`, the rewards are those of the episodes that were not truncated. Of a game, the seat with the
    largest deviation decides.
    """

    n: int
    ratio: float
    kind: Literal["std", "std_rev"]
    mask_truncated: bool = False

    def why(self, group: Group, among: Sequence[Group]) -> str | None:
        """Return the reason to reject the group, None to keep it. Of equal groups the lower ticket is kept."""
        sign = -1.0 if self.kind == "std" else 1.0
        ranked = sorted(among, key=lambda one: (sign * self._std(one), one.ticket))
        n_kept = max(1, int(self.ratio * len(ranked) + _ROUNDING))
        place = ranked.index(group)
        if place < n_kept:
            return None
        std = self._std(group)
        return f"place {place + 1} of {len(ranked)} by {self.kind} of the rewards ({std:g}), {n_kept} are kept"

    def _std(self, group: Group) -> float:
        counted = rewards(in_loss(group, mask_truncated=self.mask_truncated))
        return max((float(one.std()) for one in counted), default=0.0)


def selection(config: GenerationSection, groups_per_step: int, mask_truncated: bool = False) -> Selection | None:
    """Return the selection of a run, if it has one."""
    filters = config.filters
    if filters.rollout_filter_ratio is None:
        return None
    n = round_size(config, groups_per_step)
    return Selection(n, filters.rollout_filter_ratio, filters.rollout_filter_type, mask_truncated)


class ConfiguredPolicy:
    """`GenerationPolicy` of a run (part `generation_policy`).

    Args:
        group_size: number of episodes in a group.
        mask_truncated: truncated episodes are outside the loss, so filters do not look at them.
    """

    def __init__(
        self,
        config: GenerationSection,
        groups_per_step: int = 1,
        group_size: int = 1,
        *,
        mask_truncated: bool = False,
    ) -> None:
        self._filters: tuple[GroupFilter, ...] = group_filters(config.filters, mask_truncated)
        self._selection = selection(config, groups_per_step, mask_truncated)
        self._compared = Cohort[Group](self._selection.n) if self._selection else None
        n_round = round_size(config, groups_per_step)
        self._rounds = Rounds(n_round, group_size) if config.mode == "turn_synchronous" else None
        self._stragglers = Stragglers(config.straggler, groups_per_step) if config.straggler else None
        rounds = self._rounds.cohort if self._rounds else None
        self._cohorts = [cohort for cohort in (self._compared, rounds) if cohort is not None]

    async def generate(self, ticket: int, make: MakeGroup, void: Callable[[str], Awaitable[Group]]) -> Group:
        """As `GenerationPolicy.generate`."""
        if self._rounds is None:
            return await self._timed(ticket, lambda: make(None), void)
        async with self._rounds.joined(ticket) as barrier:
            return await self._timed(ticket, lambda: make(barrier), void)

    async def _timed(
        self, ticket: int, make: Callable[[], Awaitable[Group]], void: Callable[[str], Awaitable[Group]]
    ) -> Group:
        return await (make() if self._stragglers is None else self._stragglers.run(ticket, make, void))

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """As `GenerationPolicy.ticket`."""
        with self._compared.ticket() if self._compared else nullcontext():
            yield

    def set_starved(self, is_starved: bool) -> None:
        """As `GenerationPolicy.set_starved`."""
        for cohort in self._cohorts:
            cohort.set_starved(is_starved)

    @property
    def has_waiting(self) -> bool:
        """As `GenerationPolicy.has_waiting`."""
        return any(cohort.n_waiting for cohort in self._cohorts)

    async def filter_group(self, group: Group) -> Group:
        """As `GenerationPolicy.filter_group`."""
        if group.failure is not None:
            return group
        for one in self._filters:
            if (why := await asyncio.to_thread(one.why, group)) is not None:
                return rejected(group, one.rule, why)
        if self._selection is not None and self._compared is not None:
            among = await self._compared.join(group)
            if (why := self._selection.why(group, among)) is not None:
                return rejected(group, "rollout_filter_ratio", why)
        return group


def rejected(group: Group, rule: FilterRule, why: str) -> Group:
    """Return the empty group that is sent instead of a rejected one."""
    return Group(group.ticket, group.env, group.task, (), failure=why, rule=rule)
