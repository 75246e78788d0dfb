"""Held-out evaluation: greedy episodes on the first tasks of the split `eval`, once for each due step.

Invariants
- Every token comes from exactly the weights of the measured step; each answer's versions are checked. Until servers
  hold these weights, the trainer gets no groups for steps after this one (`EvalPlan.last_admitted`). If no server has
  the weights any more, the evaluation is dropped, and newer weights are measured.
- If a run plays several environments, each has its own line, the main one's last: only that marks the step as done.
  Other environments that cannot be measured are skipped; they do not delay the run.
- A line of `evals.jsonl` is on disk before the evaluation counts as done. Neither a restart nor a second orchestrator
  of the run measures a step again, unless its weights were undone (see `records`): a file lock beside it, released when
  its holder dies, admits one evaluation at a time.
- All evaluations of an environment use the same data, by digest; other data ends the run with a ConfigError.
- Tasks that failed (infrastructure) do not count as zeros: `success` and `reward_mean` are over the others, and
  `failed` counts them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.orchestrator.disk import retry_while_disk_full
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.evaluation.records import EvalRecord, append, as_rows, counting, read_records, summarize
from services.orchestrator.mixture.members import Offer
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.bounds import shortened
from shared.errors import ConfigError, StorageUnavailable, Unavailable, VolleyError
from shared.files import locks
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.process.sinks import MetricsFanout
from shared.run.data import check
from shared.run.folder import RunFolder
from shared.types import Lineage, Trajectory

SPLIT = "eval"
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 1}
_N_SAMPLES = 4
_MOST_TEXT = 2**18
"""Largest text of a sample, in characters: its line is handed over whole, in a body of limited size."""
_MOST_BRANCHES = 64
"""Most branches of a sample's episode in its line."""
_LOCK_POLL_S = 0.5
_log = telemetry.Log("evaluation")


class HeldOutTasks(NamedTuple):
    """Tasks 0 … n_tasks - 1 of an environment."""

    env: str
    n_tasks: int


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """When and what to evaluate: step 0, every `every` steps if set, and `last_step`.

    The tasks are 0 … n_tasks - 1 of the main environment `env`; with none, nothing is due.
    """

    env: str
    n_tasks: int
    seed: int
    every: int | None
    last_step: int

    def due(self, step: int, done: frozenset[int]) -> bool:
        """True if the weights of `step`, the newest, have to be measured now.

        If a due step was missed, the next one is measured instead: `every` is a period, not a set of steps. The first
        measurement is of the run's initial weights.
        """
        if step in done or not self.n_tasks:
            return False
        if step == self.last_step or all(s > step for s in done):
            return True
        last = max((s for s in done if s <= step), default=0)
        return self.every is not None and step // self.every > last // self.every

    def need(self, step: int) -> VersionBounds:
        return VersionBounds(min_step=step, max_step=step, strict=True)

    def last_admitted(self, step: int, done: frozenset[int]) -> int:
        """Return the last step that groups may be made for at durable `step`: the next to be measured."""
        if self.due(step, done):
            return step
        if self.every is None or not self.n_tasks:
            return self.last_step
        last = max((s for s in done if s <= step), default=0)
        ahead = max(0, (last // self.every + 1) * self.every - step)
        return min(self.last_step, step + ahead)


class Evaluator:
    """Evaluates a run.

    Args:
        folder: of the run; evals.jsonl and samples.jsonl are appended there.
        others: returns the environments to measure now, besides the main one.
        offer: returns the latest offer of an environment by the environment service, with the digests of its data.
        sinks: get each line of evals.jsonl.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        status: RunStatus,
        tokenizer: ChatTokenizer,
        plan: EvalPlan,
        folder: Path,
        others: Callable[[], Sequence[HeldOutTasks]] = tuple,
        offer: Callable[[str], Offer | None] = lambda _env: None,
        sinks: MetricsFanout | None = None,
    ) -> None:
        self._sinks = sinks or MetricsFanout()
        self._others, self._offer = others, offer
        self._dispatcher, self._status, self._tokenizer, self.plan = dispatcher, status, tokenizer, plan
        self._evals, self._samples = RunFolder(folder).evals, RunFolder(folder).samples
        self._read = read_records(self._evals)
        self._lineage: Lineage = ()

    @property
    def records(self) -> list[EvalRecord]:
        """Records that count."""
        return counting(self._read, self._lineage)

    def follow(self, lineage: Lineage) -> None:
        """Follow a new incarnation of the trainer: records of weights that it undid no longer count."""
        self._lineage = lineage

    def due(self, step: int) -> bool:
        return self.plan.due(step, self._done())

    def last_admitted(self, step: int, measured: int | None = None) -> int:
        """See `EvalPlan`. Args: measured: a step that counts as measured already."""
        done = self._done()
        return self.plan.last_admitted(step, done if measured is None else done | {measured})

    def _done(self) -> frozenset[int]:
        return frozenset(record.step for record in self.records if record.env is None)

    async def run(self, step: int) -> None:
        """Measure the weights of `step`, unless another orchestrator already has.

        Raises Unavailable if every task of the main environment failed.
        """
        lock = await retry_while_disk_full(lambda: locks.lock_file(self._evals.with_suffix(".lock")), self._report_disk)
        async with self._exclusive(lock):
            self._read = read_records(self._evals)
            if self.due(step):
                await self._measure_others(step)
                self._read.append(await self._measure(step, HeldOutTasks(self.plan.env, self.plan.n_tasks)))

    async def _measure_others(self, step: int) -> None:
        """Measure the other environments that were not measured before a restart."""
        done = {record.env for record in self.records if record.step == step}
        for tasks in self._others():
            if tasks.env not in done and tasks.n_tasks:
                try:
                    self._read.append(await self._measure(step, tasks))
                except ConfigError:
                    raise
                except VolleyError as error:
                    _log.warning("environment not evaluated", env=tasks.env, step=step, reason=str(error))

    async def _measure(self, step: int, tasks: HeldOutTasks) -> EvalRecord:
        started, offer = time.monotonic(), self._offer(tasks.env)
        self.check_data(tasks.env, offer)
        trajectories, failed = await self._trajectories(tasks, self.plan.need(step))
        env = None if tasks.env == self.plan.env else tasks.env
        digests = offer.digests if offer else None
        record = summarize(step, trajectories, failed, time.monotonic() - started, env, digests)
        samples = [self._sample(step, t, env) for t in trajectories[:_N_SAMPLES]]
        await retry_while_disk_full(lambda: append(self._samples, samples), self._report_disk)
        lines = as_rows([record])
        await retry_while_disk_full(lambda: append(self._evals, lines), self._report_disk)
        self._sinks.send("evaluation", lines[0])
        _log.info("evaluated", **dataclasses.asdict(record))
        return record

    def check_data(self, env: str, offer: Offer | None) -> None:
        """Raise ConfigError if an earlier evaluation of the environment used other data."""
        name = None if env == self.plan.env else env
        for record in self._read:
            if offer is not None and record.env == name and record.data:
                check(env, record.step, record.data, offer.digests, offer.sources)

    @asynccontextmanager
    async def _exclusive(self, lock: int) -> AsyncIterator[None]:
        """Hold the evaluation lock; waits without a deadline while another process holds it. Closes the descriptor."""
        async with AsyncExitStack() as stack:
            with self._status.waits_on("peer"):
                await stack.enter_async_context(locks.locked(lock, poll_s=_LOCK_POLL_S))
            yield

    def _report_disk(self, error: StorageUnavailable | None) -> None:
        self._status.disk = str(error) if error else None

    async def _trajectories(self, tasks: HeldOutTasks, need: VersionBounds) -> tuple[list[Trajectory], int]:
        """Return the trajectories in the order of the tasks, and the number of failed tasks.

        Raises Unavailable if all failed.
        """
        failures: list[VolleyError] = []

        async def one(index: int) -> Trajectory | None:
            spec = SamplingSpec(tasks.env, SPLIT, index, 0, index, self.plan.seed, GREEDY, need)
            try:
                return await self._dispatcher.episode(spec, "eval")
            except VolleyError as error:
                failures.append(error)
                return None
            finally:
                ended()

        with self._progress(tasks.n_tasks) as ended:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(index)) for index in range(tasks.n_tasks)]
        trajectories = [t for task in running if (t := task.result()) is not None]
        if not trajectories:
            raise Unavailable(f"all {len(failures)} held-out tasks failed, the last with {failures[-1]}")
        return trajectories, len(failures)

    @contextmanager
    def _progress(self, n_tasks: int) -> Iterator[Callable[[], None]]:
        """Show progress in the status; yield the function that counts a finished task."""
        status, n_ended = self._status, 0

        def ended() -> None:
            nonlocal n_ended
            n_ended += 1
            status.evaluated = n_ended, n_tasks

        status.evaluated = 0, n_tasks
        try:
            yield ended
        finally:
            status.evaluated = None

    def _sample(self, step: int, trajectory: Trajectory, env: str | None) -> dict[str, Any]:
        shown = trajectory.branches[:_MOST_BRANCHES]
        most = _MOST_TEXT // (1 + len(shown))
        branches = [
            {"parent": branch.parent, "shared": branch.shared, "text": self._text(branch.token_ids, most)}
            for branch in shown
        ]
        return {
            "step": step,
            **({"env": env} if env else {}),
            "task": trajectory.task,
            "success": trajectory.success,
            "reward": trajectory.reward,
            "status": trajectory.status,
            "end": trajectory.end,
            "text": self._text(trajectory.token_ids, most),
            **({"branches": branches} if branches else {}),
        }

    def _text(self, ids: np.ndarray, most: int) -> str:
        return shortened(self._tokenizer.decode(ids.tolist()), most)
