"""Calls into environment code: each in a thread, with a deadline, behind one failure boundary.

Invariants: the event loop never runs environment code; environments of one kind share a few threads that no other kind
uses, so one that hangs starves only itself. A thread cannot be ended: one whose call was given up stays counted until
the call returns. When all of a kind hang, its calls are refused at once; when they still hang a deadline later, `watch`
ends the service, because only a new process has new threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from services.env.backends.base import CALL_SECONDS, Busy, Call, GivenUp
from services.env.environments.base import Demonstration, Environment, Episode, Message, StepResult
from shared.errors import VolleyError
from shared.process import telemetry

_HUNG = telemetry.Gauge(
    "volley_env_hung_calls", "Calls that were given up and still run", ["kind"], registry=telemetry.REGISTRY
)
_log = telemetry.Log("env")


class ThreadRunner:
    """Args:
    n_threads: of one kind of environment.
    deadline_s: how long a client waits for a call.
    max_waiting: calls of one kind that may wait or run at once.
    """

    def __init__(self, n_threads: int, deadline_s: float, max_waiting: int) -> None:
        self.deadline_s = deadline_s
        self._n_threads, self._max_waiting = n_threads, max_waiting
        self._lanes: dict[str, _Lane] = {}

    async def run[T](self, name: str, kind: str, call: Call, function: Callable[[], T]) -> T:
        """Raises the environment's VolleyErrors as they are, Busy, GivenUp, and VolleyError for a defect of the
        environment.
        """
        lane = self._lane(kind)
        if lane.is_stuck:
            raise Busy(f"{name}: {lane.complaint}", retry_after_s=self.deadline_s)
        if lane.n_waiting >= self._max_waiting:
            raise Busy(f"{name}: {lane.n_waiting} calls are waiting", "try again later", retry_after_s=2.0)
        started = time.perf_counter()
        work = lane.submit(_guarded(name, call, function))
        try:
            async with asyncio.timeout(self.deadline_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if work.cancelled():
                raise Busy(
                    f"{name}: no thread was free for {call} within {self.deadline_s:g} s", "try again later"
                ) from None
            raise GivenUp(f"{name}: {call} took longer than {self.deadline_s:g} s", "the episode is given up") from None
        finally:
            lane.leave(work)
            CALL_SECONDS.labels(name, call).observe(time.perf_counter() - started)

    def why_stuck(self, kind: str) -> str | None:
        """Why environments of `kind` cannot be used; None if they can."""
        lane = self._lanes.get(kind)
        return f"{kind}: {lane.complaint}" if lane is not None and lane.is_stuck else None

    async def watch(self) -> None:
        """Worker. Raises VolleyError when all threads of a kind hang, and still do after another deadline."""
        stuck: set[str] = set()
        while True:
            await asyncio.sleep(self.deadline_s)
            now = {kind for kind, lane in self._lanes.items() if lane.is_stuck}
            if hopeless := now & stuck:
                raise VolleyError("; ".join(f"{kind}: {self._lanes[kind].complaint}" for kind in sorted(hopeless)))
            stuck = now

    def close(self) -> None:
        """Lets idle threads end; those that hang end with the process."""
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, kind: str) -> _Lane:
        if kind not in self._lanes:
            self._lanes[kind] = _Lane(kind, self._n_threads)
        return self._lanes[kind]


class InThreads:
    """The backend of an environment whose code is the service's own. It is made when it is first used.

    Args:
        kind: whose threads it shares.
        build: makes the environment; raises InputError.
    """

    def __init__(self, name: str, kind: str, build: Callable[[], Environment], runner: ThreadRunner) -> None:
        self.name, self._kind, self._runner = name, kind, runner
        self._build, self._lock = build, threading.Lock()
        self._made: Environment | None = None

    @property
    def environment(self) -> Environment:
        """The environment. Blocks while it is made; raises InputError."""
        with self._lock:
            if self._made is None:
                self._made = self._build()
            return self._made

    async def splits(self) -> tuple[str, ...]:
        return await self.call("list", lambda: self.environment.splits)

    async def num_tasks(self, split: str) -> int:
        return await self.call("list", lambda: self.environment.num_tasks(split))

    async def task(self, split: str, index: int) -> str:
        return await self.call("reset", lambda: self.environment.task(split, index))

    async def reset(self, split: str, index: int, seed: int) -> ThreadEpisode:
        def reset() -> ThreadEpisode:
            episode = self.environment.reset(split, index, seed)
            return ThreadEpisode(self, episode, self.environment.task(split, index), episode.opening)

        return await self.call("reset", reset)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        return await self.call("demonstrate", lambda: self.environment.demonstration(split, index))

    async def call[T](self, call: Call, function: Callable[[], T]) -> T:
        """Runs `function` as a call into this environment. Raises what `ThreadRunner.run` does."""
        return await self._runner.run(self.name, self._kind, call, function)

    def why_stuck(self) -> str | None:
        return self._runner.why_stuck(self._kind)


@dataclass(frozen=True, slots=True)
class ThreadEpisode:
    """An episode whose steps run in threads."""

    backend: InThreads
    episode: Episode
    task: str
    opening: tuple[Message, ...]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.episode.tools

    async def step(self, message: Message) -> StepResult:
        return await self.backend.call("step", lambda: self.episode.step(message))

    async def close(self) -> None:
        """There is nothing to free."""


class _Lane:
    """The threads of one kind. They are daemons: a call that never returns must not keep the process from ending."""

    def __init__(self, kind: str, n_threads: int) -> None:
        self.n_waiting = 0
        self.complaint = f"all {n_threads} threads hang in calls that were given up"
        self._kind, self._n_threads = kind, n_threads
        self._given_up: list[Future[Any]] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for i in range(n_threads):
            threading.Thread(target=_serve, args=(self._work,), name=f"env-{kind}-{i}", daemon=True).start()

    @property
    def is_stuck(self) -> bool:
        self._given_up = [work for work in self._given_up if not work.done()]
        _HUNG.labels(self._kind).set(len(self._given_up))
        return len(self._given_up) >= self._n_threads

    def submit[T](self, function: Callable[[], T]) -> Future[T]:
        """To be followed by `leave`."""
        work: Future[T] = Future()
        self.n_waiting += 1
        self._work.put((work, function))
        return work

    def leave(self, work: Future[Any]) -> None:
        """Nobody waits for `work` any more: it is done, never begins, or is given up."""
        self.n_waiting -= 1
        if not work.done() and not work.cancel():
            self._given_up.append(work)

    def close(self) -> None:
        for _ in range(self._n_threads):
            self._work.put(None)


def _serve(work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := work.get()) is not None:
        future, function = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the caller's, on the event loop
            future.set_exception(error)


def _guarded[T](name: str, call: Call, function: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        with _failures(name, call):
            return function()

    return run


@contextmanager
def _failures(name: str, call: Call) -> Iterator[None]:
    try:
        yield
    except VolleyError:
        raise
    except (Exception, SystemExit) as error:
        _log.exception("environment failed", env=name, call=call)
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise VolleyError(f"{name}: {call} failed with {what}", "a defect of the environment") from error
