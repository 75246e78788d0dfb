"""The course of a run, seen from the orchestrator: wait for the services, evaluate, generate while the trainer trains, evaluate, finish.

Reservations pause while an evaluation runs. So the one at step 0 ends before the first group is generated, and the one at the
last step starts when no group is generated any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.orchestrator.balancer import Balancer
from services.orchestrator.board import Board
from services.orchestrator.evaluation import Evaluator
from services.orchestrator.gate import Gate
from services.orchestrator.tickets import Queue, TicketLoop
from shared import telemetry
from shared.clients.env import EnvClient
from shared.errors import QueueUnavailable, Unavailable
from shared.queue.records import QueueState

_POLL_S = 0.25
_EVAL_ATTEMPTS = 3
_EVAL_RETRY_S = 5.0
_log = telemetry.Log("run")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tasks of the two splits, as the environment service counts them."""

    n_train: int
    n_eval: int


async def wait_for_tasks(environments: EnvClient, env: str, board: Board) -> Sizes:
    """Waits until the environment service answers. Raises NotFound for an environment or split it does not have."""
    while True:
        try:
            return Sizes(await environments.num_tasks(env, "train"), await environments.num_tasks(env, "eval"))
        except Unavailable as error:
            board.waiting_for = f"the environment service: {error}"
        await asyncio.sleep(1.0)


class Course:
    """One run from here to its end. `state` is the newest snapshot of the queue."""

    def __init__(
        self, queue: Queue, balancer: Balancer, board: Board, gate: Gate, loop: TicketLoop, evaluator: Evaluator, *, max_steps: int
    ) -> None:
        self._queue, self._balancer, self._board, self._gate = queue, balancer, board, gate
        self._loop, self._evaluator, self._max_steps = loop, evaluator, max_steps
        self.state: QueueState | None = None
        self._fresh = asyncio.Event()

    async def follow(self) -> None:
        """Returns when the last step is trained and evaluated. Raises ExceptionGroup of VolleyErrors, or bugs."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._loop.run()), group.create_task(self._watch())]
            await self._steps()
            for task in tasks:
                task.cancel()

    async def _steps(self) -> None:
        while True:
            step = (await self._next_state()).version
            if self._evaluator.due(step):
                with self._gate.held("evaluation"):
                    await self._evaluate(step)
            if step >= self._max_steps:
                return
            self._gate.release(Gate.START)

    async def _next_state(self) -> QueueState:
        """A snapshot newer than the call, of an open queue."""
        while True:
            self._fresh.clear()
            await self._fresh.wait()
            if self.state is not None and self.state.ready:
                return self.state

    async def _watch(self) -> None:
        while True:
            try:
                self.state = await self._queue.state()
            except QueueUnavailable as error:
                self._board.waiting_for = str(error)
            else:
                self._saw(self.state)
                self._fresh.set()
            await asyncio.sleep(_POLL_S)

    def _saw(self, state: QueueState) -> None:
        if state.ready:
            self._balancer.set_target(state.epoch, state.version)
            self._loop.saw(state)

    async def _evaluate(self, step: int) -> None:
        self._board.evaluating_step = step
        try:
            for attempt in range(_EVAL_ATTEMPTS):
                try:
                    await self._evaluator.run(step)
                    return
                except Unavailable as error:
                    _log.warning("evaluation failed", step=step, attempt=attempt, error=str(error))
                    if attempt + 1 == _EVAL_ATTEMPTS:
                        raise
                await asyncio.sleep(_EVAL_RETRY_S)
        finally:
            self._board.evaluating_step = None
