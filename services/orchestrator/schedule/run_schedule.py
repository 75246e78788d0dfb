"""Schedule of a run: wait for the services, evaluate, generate while the trainer trains, evaluate, finish.

Reservations pause during an evaluation, and before it none is made for a later step. So the evaluation at step 0 ends
before the first group is generated, and every other one starts when no newer weights can be trained. A run may also
generate during an evaluation; then publications pause, so newer weights cannot be trained either. If the trainer
goes back to an older checkpoint, the run follows: requests stop waiting for undone weights, and an evaluation of undone
weights ends without a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from services.orchestrator.evaluation.evaluator import Evaluator
from services.orchestrator.mixture.members import Offer, offers_in
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.ticket_loop import TicketLoop, TicketSource
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.status import RunStatus
from shared.clients.env import EnvClient
from shared.errors import Unavailable
from shared.process import telemetry
from shared.queue.records import QueueState
from shared.run.mixture import SplitSizes
from shared.run.state import in_lineage
from shared.run.wedge import Wait
from shared.types import Lineage, WeightVersion

_POLL_S = 0.25
_log = telemetry.Log("run")


async def wait_for_tasks(environments: EnvClient, env: str, status: RunStatus) -> SplitSizes:
    """Wait until the environment service answers. Raises NotFound for an unknown environment or split."""
    while True:
        try:
            return SplitSizes(await environments.num_tasks(env, "train"), await environments.num_tasks(env, "eval"))
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
        begun: called first for each new epoch, with its beginning of the run.
        generates_during_evaluation: generate groups for later steps meanwhile, and publish them afterwards.
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
        begun: Callable[[str], Awaitable[None]],
        generates_during_evaluation: bool = False,
    ) -> None:
        self._queue, self._balancer, self._status, self._gate = queue, balancer, status, gate
        self._loop, self._evaluator, self._max_steps, self._begun = loop, evaluator, max_steps, begun
        self._is_beside = generates_during_evaluation
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
    def n_held(self) -> int:
        """Number of tickets in hand."""
        return len(self._loop.held)

    async def _steps(self) -> None:
        while True:
            at = await self._next_version()
            if self._evaluator.due(at.step):
                with self._beside(at.step) if self._is_beside else self._gate.held("evaluation"):
                    await self._evaluate(at)
                    self._measured_now = None
                    self._bound(at.step)
            elif at.step >= self._max_steps:
                return
            else:
                self._gate.release(ReservationGate.START)

    @contextmanager
    def _beside(self, step: int) -> Iterator[None]:
        """Generate within for the steps after `step`, up to the next one to be measured, and publish afterwards.

        Before, no ticket was reserved for a step after this one, so every group that is published at its end was
        reserved meanwhile: the trainer cannot make newer weights before.
        """
        with self._loop.publications_held():
            self._measured_now = step
            self._bound(step)
            self._gate.release(ReservationGate.START)
            try:
                yield
            finally:
                self._measured_now = None

    async def _next_version(self) -> WeightVersion:
        """Return the version of an open queue, from a snapshot taken after the call."""
        while True:
            self._fresh.clear()
            await self._fresh.wait()
            if self.state is not None and self.state.ready:
                return WeightVersion(self.state.epoch, self.state.version)

    async def _watch(self) -> None:
        while True:
            held = self._loop.held
            try:
                await self._saw(await self._queue.state(), held)
            except Unavailable as error:
                self._status.waiting = Wait(error.waits_on or "disk", str(error))
            else:
                self._fresh.set()
            await asyncio.sleep(_POLL_S)

    async def _saw(self, state: QueueState, held: tuple[int, ...]) -> None:
        """Process a snapshot. Args: held: tickets that were in hand before it was taken."""
        if self.state is None or _position(state) != _position(self.state):
            self._status.moved()
        self._status.refused = state.refused
        if state.ready:
            version = WeightVersion(state.epoch, state.version)
            if state.epoch != self._epoch:
                await self._begun(state.beginning)
                self._lineage, self._epoch = state.lineage or ((state.epoch, 0),), state.epoch
                self._evaluator.follow(self._lineage)
            self._loop.saw(state, held)
            self._bound(version.step)
            self._balancer.set_target(version, self._lineage)
        self.state = state

    def _bound(self, step: int) -> None:
        """Limit generation to steps up to the next one to be measured."""
        self._loop.last_step = self._evaluator.last_admitted(step, self._measured_now)

    async def _evaluate(self, at: WeightVersion) -> None:
        """Evaluate until there is a record, or until the weights are undone or replaced by newer ones."""
        self._status.evaluating_step = at.step
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(self._evaluator.run(at.step)), group.create_task(self._left(at))}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        finally:
            self._status.evaluating_step = None

    async def _left(self, version: WeightVersion) -> None:
        """Return when these are no longer the newest weights: servers may no longer have them."""
        now = version
        while in_lineage(version, self._lineage) and now.step == version.step:
            now = await self._next_version()
        _log.warning("evaluation dropped: the weights have changed", version=str(version), now=str(now))


def _position(state: QueueState) -> tuple[int, ...]:
    """Return the parts of a snapshot that change only when the run advances or goes back."""
    return state.epoch, state.ready, state.version, state.low, state.void, state.depth
