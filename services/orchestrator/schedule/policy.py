"""Generation policy: when groups are generated, and which complete groups are sent to the trainer.

Invariant: every decision is a group under its own ticket, so the ticket ends in exactly one disposition: a rejected
group is sent without trajectories and with its rule, and the trainer ends its ticket as `filtered(rule)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from services.orchestrator.episodes.turn import TurnBarrier
from shared import packages
from shared.generation_schema import GenerationFilters, GenerationSection
from shared.types import Group

type MakeGroup = Callable[[TurnBarrier | None], Awaitable[Group]]
"""Makes a group; with a barrier, its episodes advance with those of other groups."""
type VoidGroup = Callable[[str], Awaitable[Group]]
"""Returns the group of a straggler, for a reason."""


class GenerationPolicy(Protocol):
    """Policy of one run."""

    async def generate(self, ticket: int, make: MakeGroup, void: VoidGroup) -> Group:
        """Generate a group once the policy lets it start."""
        ...

    def ticket(self) -> AbstractContextManager[None]:
        """Count a ticket as undecided."""
        ...

    def set_starved(self, is_starved: bool) -> None:
        """Record whether no ticket is available: groups then stop waiting for more of them."""
        ...

    @property
    def has_waiting(self) -> bool:
        """True if groups wait for others."""
        ...

    async def filter_group(self, group: Group) -> Group:
        """Return the group, or a rejected one."""
        ...


class EveryGroup:
    """Policy that generates groups at once, and sends them all."""

    has_waiting = False

    async def generate(self, ticket: int, make: MakeGroup, void: VoidGroup) -> Group:
        return await make(None)

    def ticket(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_starved(self, is_starved: bool) -> None: ...

    async def filter_group(self, group: Group) -> Group:
        return group


def policy_of(
    config: GenerationSection, groups_per_step: int, group_size: int, *, mask_truncated: bool
) -> GenerationPolicy:
    """Return the policy of a run. Raises ConfigError if no package brings what it asks for.

    Args:
        group_size: number of episodes in a group.
        mask_truncated: truncated episodes are outside the loss, so filters do not look at them.
    """
    if config.mode == "asynchronous" and config.straggler is None and config.filters == GenerationFilters():
        return EveryGroup()
    made = packages.part("generation_policy")
    return made(config, groups_per_step, group_size, mask_truncated=mask_truncated)
