"""Schedule of a run: wait for the services, evaluate, generate while the trainer trains, evaluate, finish.

An evaluation runs during training: servers hold its weights (`ServerHolds`). Groups for later steps are generated at
any time, and published once a server is held, so the weights to be measured are not replaced before. Without holds,
training stops for the evaluation: no group is generated meanwhile, and before it none is reserved for a later step. If
the trainer goes back to an older checkpoint, the run follows: requests stop waiting for undone weights, and an
evaluation of undone weights ends without a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from services.orchestrator.evaluation.evaluator import Evaluator
from services.orchestrator.mixture.members import Offer, offers_in
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.ticket_loop import TicketLoop, TicketSource
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.servers.holding import ServerHolds
from services.orchestrator.status import RunStatus
from shared.clients.env import EnvClient
from shared.errors import NotFound, Unavailable, WeightsError
from shared.process import telemetry
from shared.queue.records import QueueState
from shared.run.lineage import in_lineage
from shared.run.mixture import SplitSizes
from shared.run.waits import Wait
from shared.types import Lineage, WeightVersion

_POLL_S = 0.25
_log = telemetry.Log("run")


async def wait_for_tasks(environments: EnvClient, env: str, status: RunStatus) -> SplitSizes:
    """Wait until the environment service answers. Raises NotFound for an unknown environment.

    An environment without a split `eval` has no held-out tasks.
    """
    while True:
        try:
            n_train = await environments.num_tasks(env, "train")
            try:
                return SplitSizes(n_train, await environments.num_tasks(env, "eval"))
            except NotFound:
                return SplitSizes(n_train, 0)
        except Unavailable as error:
            status.waiting = Wait("env", f"the environment service: {error}")
        await asyncio.sleep(1.0)


async def wait_for_offers(environments: EnvClient, status: RunStatus) -> Mapping[str, Offer]:
    """Wait until the environment service answers. Raises VolleyError for a malformed answer."""
    while True:
        try:
            return offers_in(await environments.environments())
        except Unavailable as error:
            status.waiting = Wait("env", f"the environment service: {error}")
        await asyncio.sleep(1.0)


class RunSchedule:
    """Schedule of one run, from now to its end. `state` is the newest snapshot of the queue.

    Args:
        on_epoch: called first for each new epoch, with the run's id.
        holds: holds servers at the version to evaluate while training goes on; None stops training instead.
    """

    def __init__(
        self,
        queue: TicketSource,
        balancer: Balancer,
        status: RunStatus,
        gate: ReservationGate,
        loop: TicketLoop,
        evaluator: Evaluator,
        *,
        max_steps: int,
        on_epoch: Callable[[str], Awaitable[None]],
        holds: ServerHolds | None = None,
    ) -> None:
        self._queue, self._balancer, self._status, self._gate = queue, balancer, status, gate
        self._loop, self._evaluator, self._max_steps, self._on_epoch = loop, evaluator, max_steps, on_epoch
        self._holds = holds
        self._measured_now: int | None = None
        self.state: QueueState | None = None
        self._lineage: Lineage = ()
        self._epoch = -1
        self._fresh = asyncio.Event()

    async def follow(self) -> None:
        """Return when the last step is trained and evaluated. Raises ExceptionGroup of VolleyErrors, or bugs."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._loop.run()), group.create_task(self._watch())]
            await self._steps()
            for task in tasks:
                task.cancel()

    @property
    def n_leased(self) -> int:
        """Number of tickets that this process has leased."""
        return len(self._loop.leased)

    async def _steps(self) -> None:
        while True:
            at = await self._next_version()
            if self._holds is not None and (measured := self._due(at)) is not None:
                await self._evaluate_during_training(measured, self._holds)
            elif self._evaluator.due(at.step):
                with self._gate.closed_for("evaluation"):
                    await self._evaluate(at)
                    self._bound(at.step)
            elif at.step >= self._max_steps:
                return
            else:
                self._gate.release(ReservationGate.START)

    def _due(self, newest: WeightVersion) -> WeightVersion | None:
        """Return the version to measure now: the oldest due one that a server still has, or the newest.

        Servers have an older one if this process was started again during its evaluation.
        """
        served = {server.version for server in self._balancer.servers if server.version and not server.out}
        usable = [one for one in served if one.step < newest.step and in_lineage(one, self._lineage)]
        return next((one for one in (*sorted(usable), newest) if self._evaluator.due(one.step)), None)

    async def _evaluate_during_training(self, at: WeightVersion, holds: ServerHolds) -> None:
        """Evaluate while training goes on, up to the next step to be measured."""

        def bound() -> None:
            self._measured_now = at.step if holds.any else None
            self._bound(self.state.version if self.state else at.step)

        self._gate.release(ReservationGate.START)
        try:
            async with holds.holding(at, bound):
                await self._evaluate(at)
        finally:
            bound()

    async def _next_version(self) -> WeightVersion:
        """Return the version of an open queue, from a snapshot taken after the call."""
        while True:
            self._fresh.clear()
            await self._fresh.wait()
            if self.state is not None and self.state.ready:
                return WeightVersion(self.state.epoch, self.state.version)

    async def _watch(self) -> None:
        while True:
            leased = self._loop.leased
            try:
                await self._apply(await self._queue.state(), leased)
            except Unavailable as error:
                self._status.waiting = Wait(error.waits_on or "disk", str(error))
            else:
                self._fresh.set()
            await asyncio.sleep(_POLL_S)

    async def _apply(self, state: QueueState, leased: tuple[int, ...]) -> None:
        """Apply a snapshot of the queue. Args: leased: tickets leased before it was taken."""
        if self.state is None or _position(state) != _position(self.state):
            self._status.moved()
        self._status.refused = state.refused
        if state.ready:
            version = WeightVersion(state.epoch, state.version)
            if state.epoch != self._epoch:
                await self._on_epoch(state.beginning)
                self._lineage, self._epoch = state.lineage or ((state.epoch, 0),), state.epoch
                self._evaluator.follow(self._lineage)
            self._loop.update_queue_state(state, leased)
            self._bound(version.step)
            self._balancer.set_target(version, self._lineage)
            if self._loop.lacks_groups(state) and (why := self._balancer.why_refused()) is not None:
                raise WeightsError(why, "no server can sample the groups that the trainer needs for newer weights")
        self.state = state

    def _bound(self, step: int) -> None:
        """Limit publication, or without holds generation, to steps up to the next one to be measured."""
        last = self._evaluator.last_admitted(step, self._measured_now)
        if self._holds is not None:
            self._loop.publishable_step = last
        else:
            self._loop.last_step = last

    async def _evaluate(self, at: WeightVersion) -> None:
        """Evaluate until there is a record, or until the weights are undone or replaced by newer ones."""
        self._status.evaluating_step = at.step
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(self._measure(at)), group.create_task(self._wait_until_replaced(at))}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        finally:
            self._status.evaluating_step = None

    async def _measure(self, at: WeightVersion) -> None:
        """Measure; if not one task succeeded, drop the evaluation if there are newer weights, else fail the run."""
        try:
            await self._evaluator.run(at.step)
        except Unavailable as error:
            if self.state is None or self.state.version == at.step:
                raise
            _log.warning("evaluation dropped", version=str(at), reason=str(error))

    async def _wait_until_replaced(self, version: WeightVersion) -> None:
        """Return once no server may have these weights: undone, or replaced and not held."""
        now = version
        while in_lineage(version, self._lineage) and (now.step == version.step or (self._holds and self._holds.any)):
            now = await self._next_version()
        _log.warning("evaluation dropped: the weights have changed", version=str(version), now=str(now))


def _position(state: QueueState) -> tuple[int, ...]:
    """Return the parts of a snapshot that change only when the run advances or goes back."""
    return state.epoch, state.ready, state.version, state.low, state.void, state.depth
