"""Run one ticket's group: G concurrent episodes of one task.

A group is either complete, or failed with the error's class, the environment and the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.orchestrator.episodes.context import EpisodeContext
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.teaching import GroupTeaching
from services.orchestrator.episodes.turn import SamplingSpec, TurnBarrier
from services.orchestrator.judges import GroupJudges
from services.orchestrator.servers.balancer import VersionBounds
from shared.errors import VolleyError, first_error
from shared.outcomes import FilterRule
from shared.process import telemetry
from shared.run.seeding import TicketTask
from shared.types import Group, Trajectory

_log = telemetry.Log("groups")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Settings that all groups of a run share.

    `sampling` holds temperature, top_p and top_k; G is `group_size`; `task_of` returns a ticket's task; `routing` is
    that of `SamplingSpec`; `judges` grade complete groups; `privileged` returns the teacher that scores whole groups of
    an environment, if it has one.
    """

    split: str
    group_size: int
    seed: int
    sampling: Mapping[str, Any]
    task_of: Callable[[int], Awaitable[TicketTask]]
    routing: bool = False
    judges: GroupJudges | None = None
    privileged: Callable[[str], GroupTeaching | None] = lambda _: None

    def specs(
        self, task: TicketTask, ticket: int, need: VersionBounds, barrier: TurnBarrier | None = None
    ) -> list[SamplingSpec]:
        first = SamplingSpec(
            task.env, self.split, task.index, ticket, 0, self.seed, self.sampling, need, self.routing, barrier
        )
        is_taught = self.privileged(task.env) is not None
        return [
            replace(first, sample_index=sample_index, context=EpisodeContext() if is_taught else None)
            for sample_index in range(self.group_size)
        ]

    def void(self, task: TicketTask, ticket: int, why: str, rule: FilterRule | None = None) -> Group:
        """Return the group of a ticket that ends without episodes."""
        return Group(ticket, task.env, f"{self.split}/{task.index}", (), failure=why, rule=rule)


async def run_group(
    dispatcher: Dispatcher, plan: GroupPlan, ticket: int, need: VersionBounds, barrier: TurnBarrier | None = None
) -> Group:
    """Run the group of a ticket. If one sample fails all its attempts, the group fails and the others are stopped.

    A complete group that its judges or its teacher do not grade fails, too.
    """
    failure: VolleyError | None = None
    task = await plan.task_of(ticket)
    specs, running = plan.specs(task, ticket, need, barrier), list[asyncio.Task[Trajectory]]()
    try:
        async with asyncio.TaskGroup() as episodes:
            running += [episodes.create_task(dispatcher.episode(spec, "train")) for spec in specs]
        trajectories = tuple(episode.result() for episode in running)
        group = Group(ticket, task.env, trajectories[0].task, trajectories)
        if plan.judges is not None:
            group = await plan.judges.judge(group)
        if (teaching := plan.privileged(task.env)) is not None:
            contexts = [spec.context for spec in specs if spec.context is not None]
            group = replace(group, trajectories=await teaching.teach(group.trajectories, contexts))
        return group
    except* VolleyError as errors:
        failure = first_error(errors)
    _log.warning("group failed", ticket=ticket, env=task.env, error=type(failure).__name__, detail=str(failure))
    where = getattr(failure, "__notes__", [])[-1:]  # the environment and the turn
    return plan.void(task, ticket, " ".join([type(failure).__name__, *where]))
