"""Held-out evaluation: greedy episodes on the first tasks of the split `eval`, once for each step that asks for it.

Invariants
- At step 0 and at the last step every token comes from exactly that step's weights; a task that got others counts as
  failed.
- A line of `evals.jsonl` is on disk before the evaluation counts as done. Neither a restart nor a second orchestrator
  of the run measures a step again, unless its weights were undone (see `records`): a lock on a file beside it, which
  dies with its holder, lets one at a time evaluate.
- Tasks that failed (infrastructure) are no zeros: `success` and `reward_mean` are over the others, `failed` tells how
  many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.evaluation.records import (
    EvalRecord,
    append,
    as_rows,
    counting,
    once_there_is_room,
    read_records,
    summarize,
)
from services.orchestrator.schedule.lineage import Lineage
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.errors import StorageUnavailable, Unavailable, VolleyError
from shared.files import locks
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.run.folder import RunFolder
from shared.types import Trajectory

SPLIT = "eval"
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 1}
_N_SAMPLES = 4
_LOCK_POLL_S = 0.5
_log = telemetry.Log("evaluation")


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """When and on what: step 0, every `every` steps if set, and `last_step`; tasks 0 … n_tasks - 1."""

    env: str
    n_tasks: int
    seed: int
    every: int | None
    last_step: int

    def due(self, step: int, done: frozenset[int]) -> bool:
        """Whether the weights of this step, the newest, have to be measured now.

        A step that passed unseen is made up for by the next one: `every` is a period, not a set of numbers.
        """
        if step in done:
            return False
        if step in (0, self.last_step):
            return True
        last = max((s for s in done if s <= step), default=0)
        return self.every is not None and step // self.every > last // self.every

    def need(self, step: int) -> VersionBounds:
        return VersionBounds(min_step=step, max_step=step if step in (0, self.last_step) else None, strict=True)


class Evaluator:
    """Args: folder: of the run; evals.jsonl and samples.jsonl are appended there."""

    def __init__(
        self, dispatcher: Dispatcher, status: RunStatus, tokenizer: ChatTokenizer, plan: EvalPlan, folder: Path
    ) -> None:
        self._dispatcher, self._status, self._tokenizer, self.plan = dispatcher, status, tokenizer, plan
        self._evals, self._samples = RunFolder(folder).evals, RunFolder(folder).samples
        self._read = read_records(self._evals)
        self._lineage: Lineage = ()

    @property
    def records(self) -> list[EvalRecord]:
        """Those that count."""
        return counting(self._read, self._lineage)

    def follow(self, lineage: Lineage) -> None:
        """The trainer has a new incarnation: records of weights that it undid do not count any more."""
        self._lineage = lineage

    def due(self, step: int) -> bool:
        return self.plan.due(step, frozenset(record.step for record in self.records))

    async def run(self, step: int) -> None:
        """Measures the weights of `step`, unless another orchestrator has. Raises Unavailable when no task came
        through.
        """
        lock = await once_there_is_room(lambda: locks.lock_file(self._evals.with_suffix(".lock")), self._waiting)
        async with self._alone(lock):
            self._read = read_records(self._evals)
            if self.due(step):
                self._read.append(await self._measure(step))

    async def _measure(self, step: int) -> EvalRecord:
        started = time.monotonic()
        trajectories, failed = await self._trajectories(self.plan.need(step))
        record = summarize(step, trajectories, failed, time.monotonic() - started)
        samples = [self._sample(step, t) for t in trajectories[:_N_SAMPLES]]
        await once_there_is_room(lambda: append(self._samples, samples), self._waiting)
        await once_there_is_room(lambda: append(self._evals, as_rows([record])), self._waiting)
        _log.info("evaluated", **dataclasses.asdict(record))
        return record

    @asynccontextmanager
    async def _alone(self, lock: int) -> AsyncIterator[None]:
        """Waits for as long as another process evaluates; ends only so, or by cancellation. Closes the descriptor."""
        async with AsyncExitStack() as stack:
            with self._status.waits_on("peer"):
                await stack.enter_async_context(locks.locked(lock, poll_s=_LOCK_POLL_S))
            yield

    def _waiting(self, error: StorageUnavailable | None) -> None:
        self._status.disk = str(error) if error else None

    async def _trajectories(self, need: VersionBounds) -> tuple[list[Trajectory], int]:
        """The trajectories in the order of the tasks, and how many tasks failed. Raises Unavailable if all did."""
        failures: list[VolleyError] = []

        async def one(index: int) -> Trajectory | None:
            spec = SamplingSpec(self.plan.env, SPLIT, index, 0, index, self.plan.seed, GREEDY, need)
            try:
                return await self._dispatcher.episode(spec, "eval")
            except VolleyError as error:
                failures.append(error)
                return None
            finally:
                ended()

        with self._counting() as ended:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index)) for index in range(self.plan.n_tasks)]
        trajectories = [t for task in tasks if (t := task.result()) is not None]
        if not trajectories:
            raise Unavailable(f"all {len(failures)} held-out tasks failed, the last with {failures[-1]}")
        return trajectories, len(failures)

    @contextmanager
    def _counting(self) -> Iterator[Callable[[], None]]:
        """Inside, the status tells how many tasks have ended; gives what counts one."""
        status, n_ended = self._status, 0

        def ended() -> None:
            nonlocal n_ended
            n_ended += 1
            status.evaluated = n_ended, self.plan.n_tasks

        status.evaluated = 0, self.plan.n_tasks
        try:
            yield ended
        finally:
            status.evaluated = None

    def _sample(self, step: int, trajectory: Trajectory) -> dict[str, Any]:
        return {
            "step": step,
            "task": trajectory.task,
            "success": trajectory.success,
            "reward": trajectory.reward,
            "status": trajectory.status,
            "end": trajectory.end,
            "text": self._tokenizer.decode(trajectory.token_ids.tolist()),
        }
