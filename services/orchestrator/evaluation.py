"""Held-out evaluation: greedy episodes on the first tasks of the split `eval`, once for each step that asks for it.

Invariants
- At step 0 and at the last step every token comes from exactly that step's weights; a task that got others counts as failed.
- `evals.jsonl` has one line a step, on disk before the evaluation counts as done. Neither a restart nor a second orchestrator
  of the run measures a step again: a lock on a file beside it, which dies with its holder, lets one at a time evaluate.
- Tasks that failed (infrastructure) are no zeros: `success` and `reward_mean` are over the others, `failed` tells how many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.orchestrator.balancer import Need
from services.orchestrator.dispatch import Dispatcher
from services.orchestrator.recorder import ASSISTANT
from services.orchestrator.sampling import Spec
from shared import telemetry
from shared.chat import ChatTokenizer
from shared.errors import Unavailable, VolleyError
from shared.types import Trajectory, WeightVersion

SPLIT = "eval"
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 1}
_N_SAMPLES = 4
_LOCK_POLL_S = 0.5
_log = telemetry.Log("evaluation")


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One line of evals.jsonl. `version_min` and `version_max` are over all sampled tokens; `tokens` are sampled ones."""

    step: int
    version_min: str
    version_max: str
    n_tasks: int
    success: float
    reward_mean: float
    turns_mean: float
    tokens: int
    elapsed_s: float
    failed: int


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

    def need(self, step: int) -> Need:
        return Need(min_step=step, max_step=step if step in (0, self.last_step) else None)


class Evaluator:
    """Args: folder: of the run; evals.jsonl and samples.jsonl are appended there."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: ChatTokenizer, plan: EvalPlan, folder: Path) -> None:
        self._dispatcher, self._tokenizer, self.plan = dispatcher, tokenizer, plan
        self._evals, self._samples = folder / "evals.jsonl", folder / "samples.jsonl"
        self.records = read_records(self._evals)

    def due(self, step: int) -> bool:
        return self.plan.due(step, frozenset(record.step for record in self.records))

    async def run(self, step: int) -> None:
        """Measures the weights of `step`, unless another orchestrator has. Raises Unavailable when no task came through."""
        async with _alone(self._evals.with_suffix(".lock")):
            self.records = read_records(self._evals)
            if self.due(step):
                self.records.append(await self._measure(step))

    async def _measure(self, step: int) -> EvalRecord:
        started = time.monotonic()
        trajectories, failed = await self._trajectories(self.plan.need(step))
        record = summarize(step, trajectories, failed, time.monotonic() - started)
        await asyncio.to_thread(append_lines, self._samples, [self._sample(step, t) for t in trajectories[:_N_SAMPLES]])
        await asyncio.to_thread(append_lines, self._evals, [dataclasses.asdict(record)])
        _log.info("evaluated", **dataclasses.asdict(record))
        return record

    async def _trajectories(self, need: Need) -> tuple[list[Trajectory], int]:
        """The trajectories in the order of the tasks, and how many tasks failed. Raises Unavailable if all did."""
        failures: list[VolleyError] = []

        async def one(index: int) -> Trajectory | None:
            spec = Spec(self.plan.env, SPLIT, index, 0, index, self.plan.seed, GREEDY, need)
            try:
                return await self._dispatcher.episode(spec, "eval")
            except VolleyError as error:
                failures.append(error)
                return None

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(self.plan.n_tasks)]
        trajectories = [t for task in tasks if (t := task.result()) is not None]
        if not trajectories:
            raise Unavailable(f"all {len(failures)} held-out tasks failed, the last with {failures[-1]}")
        return trajectories, len(failures)

    def _sample(self, step: int, trajectory: Trajectory) -> dict[str, Any]:
        return {
            "step": step,
            "task": trajectory.task,
            "success": trajectory.success,
            "reward": trajectory.reward,
            "status": trajectory.status,
            "text": self._tokenizer.decode(trajectory.token_ids.tolist()),
        }


def summarize(step: int, trajectories: Sequence[Trajectory], failed: int, elapsed_s: float) -> EvalRecord:
    """Means over the trajectories (at least one); failed tasks are counted, not averaged."""
    n = len(trajectories)
    versions = [WeightVersion.parse(span.version) for t in trajectories for span in t.versions]
    return EvalRecord(
        step=step,
        version_min=str(min(versions)),
        version_max=str(max(versions)),
        n_tasks=n + failed,
        success=sum(t.success for t in trajectories) / n,
        reward_mean=sum(t.reward for t in trajectories) / n,
        turns_mean=sum(turn.role == ASSISTANT for t in trajectories for turn in t.turns) / n,
        tokens=sum(t.n_sampled for t in trajectories),
        elapsed_s=round(elapsed_s, 3),
        failed=failed,
    )


def read_records(path: Path) -> list[EvalRecord]:
    """The whole lines of evals.jsonl; a last line that a crash cut off is removed from the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return [EvalRecord(**orjson.loads(line)) for line in whole.splitlines() if line.strip()]


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Waits for as long as another process evaluates; ends only so, or by cancellation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _locked(lock):  # noqa: ASYNC110 - another process holds it; there is no event to wait for
            await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON lines and makes them durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for row in rows:
            file.write(orjson.dumps(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())
