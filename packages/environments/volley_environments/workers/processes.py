"""Backend of a built-in environment whose episodes run in worker processes, and the part `env.processes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.env.backend import Call, call_seconds
from services.env.episode_types import Demonstration, Message, StepResult
from services.env.settings import EnvSettings
from services.env.threads import InThreads
from volley_environments.workers.pool import Worker, WorkerPool, WorkerSettings
from volley_sandbox import wire


@dataclass(frozen=True, slots=True)
class InProcesses:
    """Environment in worker processes.

    Args:
        local: the same environment in the service itself, for cheap calls: splits and numbers of tasks.
    """

    local: InThreads
    kind: str
    config: Mapping[str, Any]
    pool: WorkerPool

    async def splits(self) -> tuple[str, ...]:
        return await self.local.splits()

    async def num_tasks(self, split: str) -> int:
        return await self.local.num_tasks(split)

    async def task(self, split: str, index: int) -> str:
        with self.timed("reset"):
            return await self.pool.ask("task", **self._named(split, index))

    async def reset(self, split: str, index: int, seed: int) -> ProcessEpisode:
        with self.timed("reset"):
            worker, number, opened = await self.pool.begin(seed=seed, **self._named(split, index))
        return ProcessEpisode(
            self, worker, number, opened["task"], tuple(opened["opening"]), opened["tools"], opened["database"]
        )

    async def demonstration(self, split: str, index: int) -> Demonstration:
        with self.timed("demonstrate"):
            return wire.demonstration_of(await self.pool.ask("demonstration", **self._named(split, index)))

    def stuck_reason(self) -> str | None:
        return self.pool.why_unroutable()

    def timed(self, call: Call) -> Any:
        """Time a call."""
        return call_seconds(self.local.name, call).time()

    def _named(self, split: str, index: int) -> dict[str, Any]:
        return {"env": self.local.name, "kind": self.kind, "config": self.config, "split": split, "index": index}


@dataclass(slots=True)
class ProcessEpisode:
    """An episode in a worker process."""

    backend: InProcesses
    worker: Worker
    number: str
    task: str
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    database: str | None = None
    closed: bool = False

    async def step(self, message: Message) -> StepResult:
        with self.backend.timed("step"):
            return wire.step_of(await self.backend.pool.step(self.worker, self.number, message))

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.worker.forget(self.number)


class Processes(WorkerPool):
    """Worker processes, and the backends of environments in them."""

    def backend(self, local: InThreads, kind: str, config: Mapping[str, Any]) -> InProcesses:
        """Return the environment with its episodes in the processes."""
        return InProcesses(local, kind, config, self)


def processes_of(settings: EnvSettings) -> Processes:
    """Return the processes that the service's settings ask for."""
    worker = WorkerSettings(settings.n_threads, settings.deadline_s, settings.max_episodes)
    return Processes(settings.n_processes, worker)
