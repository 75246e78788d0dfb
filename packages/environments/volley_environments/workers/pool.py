"""Worker processes for the built-in environments, so that their code uses several cores.

Invariants
- An episode stays in the process that started it. If that process ends, only its episodes are lost: requests for them
  fail, and another process replaces it.
- No process outlives the service: it ends when its socket is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson

from shared.errors import Busy, GivenUp, NotFound, RateLimited, Unavailable, from_problem
from shared.process import telemetry
from volley_sandbox import wire

_MODULE = "volley_environments.workers.worker_main"
_START_S = 60.0
_RESTART_S = 1.0
_STOP_S = 2.0
_ENDED = telemetry.Counter(
    "volley_env_workers_ended", "Worker processes that ended and were replaced", registry=telemetry.REGISTRY
)
_log = telemetry.Log("workers")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of each process: threads of one kind of environment, seconds for one call, and calls that may wait.

    A process that does not answer within `grace_s` after a call's deadline is killed.
    """

    n_threads: int
    deadline_s: float
    max_waiting: int
    grace_s: float = 10.0


class WorkerGone(Exception):
    """The process has ended."""


class Worker:
    """One running process. `n_episodes` counts its open episodes."""

    def __init__(self, process: asyncio.subprocess.Process, settings: WorkerSettings) -> None:
        self.n_episodes = 0
        self._process, self._timeout_s = process, settings.deadline_s + settings.grace_s
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def start(cls, settings: WorkerSettings, digests: Mapping[str, str]) -> tuple[Self, asyncio.StreamReader]:
        """Start a process and wait until it is ready. Raises OSError if that fails.

        Args:
            digests: digests of data files, by path.
        """
        ours, theirs = socket.socketpair()
        arguments: list[object] = [theirs.fileno(), settings.n_threads, settings.deadline_s, settings.max_waiting]
        arguments.append(orjson.dumps(dict(digests)).decode())
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", _MODULE, *map(str, arguments)),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=(theirs.fileno(),),
                )
            worker = cls(process, settings)
            reader, worker._writer = await asyncio.open_connection(sock=ours, limit=wire.MAX_LINE)
        except BaseException:
            ours.close()
            raise
        try:
            async with asyncio.timeout(_START_S):
                if await wire.read(reader) is None:
                    raise ConnectionResetError("the process ended at once")
        except BaseException:
            await worker.end()
            raise
        return worker, reader

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._writer is not None

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Deliver answers until the process ends."""
        try:
            while (answer := await wire.read(reader)) is not None:
                future = self._waiting.pop(answer["id"], None)
                if future is not None and not future.done():
                    future.set_result(answer)
        except ConnectionError:
            pass
        finally:
            await self.end()

    async def end(self) -> None:
        """End the process and fail the waiting calls. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerGone())
        self._waiting.clear()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def ask(self, call: str, **params: Any) -> Any:
        """Send a call and return the answer. Raises WorkerGone, and what the environment raises."""
        if self._writer is None:
            raise WorkerGone
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(wire.encode({"id": number, "call": call, **params}))
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError:
            _log.error("worker process does not answer", pid=self.pid, call=call)
            self._process.kill()
            raise GivenUp(f"a worker process did not answer a {call}", "the episode is given up") from None
        finally:
            self._waiting.pop(number, None)
        if "error" not in answer:
            return answer["value"]
        error = from_problem(int(answer["error"]["status"]), answer["error"])
        raise Busy(error.detail, error.hint, error.retry_after_s) if isinstance(error, RateLimited) else error

    def forget(self, episode: str) -> None:
        """Close an episode."""
        self.n_episodes -= 1
        if self._writer is not None:
            self._writer.write(wire.encode({"call": "close", "episode": episode}))


class WorkerPool:
    """Worker processes of the service.

    Args:
        n: number of processes.
    """

    def __init__(self, n: int, settings: WorkerSettings) -> None:
        self._n, self._settings = n, settings
        self._workers: list[Worker] = []
        self._changed = asyncio.Event()
        self._episodes = itertools.count(1)
        self._trouble = ""
        self._digests: Mapping[str, str] = {}

    def expect(self, digests: Mapping[str, str]) -> None:
        """Set the digests of data files, by path, for processes started later."""
        self._digests = dict(digests)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in list(self._workers):
            await worker.end()

    async def keep(self) -> None:
        """Worker: keep the configured number of processes running."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._n):
                group.create_task(self._keep_one())

    async def begin(self, **params: Any) -> tuple[Worker, str, Any]:
        """Start an episode; return its process, number and opening.

        Raises Unavailable, and what the environment raises.
        """
        worker, episode = await self._least_busy(), f"e{next(self._episodes)}"
        worker.n_episodes += 1
        try:
            return worker, episode, await self._asked(worker, "reset", episode=episode, **params)
        except BaseException:
            worker.forget(episode)
            raise

    async def ask(self, call: str, **params: Any) -> Any:
        """Make a call that belongs to no episode. Raises what `begin` does."""
        return await self._asked(await self._least_busy(), call, **params)

    async def step(self, worker: Worker, episode: str, message: Any) -> Any:
        """Step an episode. Raises NotFound if its process is gone, and what the environment raises."""
        try:
            return await worker.ask("step", episode=episode, message=message)
        except WorkerGone:
            raise NotFound("the worker process that had the episode has ended", "create another one") from None

    @property
    def n_running(self) -> int:
        return len(self._alive)

    @property
    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.alive]

    def why_unroutable(self) -> str | None:
        return None if self._alive else f"no worker process is running: {self._trouble or 'they are being started'}"

    async def _asked(self, worker: Worker, call: str, **params: Any) -> Any:
        try:
            return await worker.ask(call, **params)
        except WorkerGone:
            raise Unavailable("the worker process ended during the call", "try again") from None

    async def _least_busy(self) -> Worker:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                while not (alive := self._alive):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(self.why_unroutable() or "no worker process is running", "try again later") from None
        worker = min(alive, key=lambda one: one.n_episodes)
        self._workers.remove(worker)  # among equally busy processes, the least recently used comes first
        self._workers.append(worker)
        return worker

    async def _keep_one(self) -> None:
        while True:
            began = time.monotonic()
            try:
                worker, reader = await Worker.start(self._settings, self._digests)
            except OSError as error:
                self._trouble = f"it cannot be started: {error.strerror or error}"
                _log.error("worker process cannot be started", reason=str(error))
                await asyncio.sleep(_RESTART_S)
                continue
            self._workers.append(worker)
            self._changed.set()
            _log.info("worker process started", pid=worker.pid)
            try:
                await worker.listen(reader)
            finally:
                self._workers = [one for one in self._workers if one is not worker]
            _ENDED.inc()
            self._trouble = f"the last one ended with exit code {worker.exit_code}"
            _log.error("worker process ended", pid=worker.pid, exit_code=worker.exit_code, episodes=worker.n_episodes)
            await asyncio.sleep(max(0.0, began + _RESTART_S - time.monotonic()))
