"""Calls into environment code: each in a thread, with a deadline, behind one failure boundary.

Invariants: the event loop never runs environment code. Environments of one kind share a few threads that no other kind
uses, so a hanging environment starves only its kind. A thread cannot be killed: after a call is given up, its thread
counts as hung until the call returns. While all threads of a kind hang, its calls are refused at once; if they still
hang a deadline later, `watch` ends the service, because only a new process has new threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from services.env.backend import Call, call_seconds
from services.env.episode_types import (
    AsyncEnvironment,
    AsyncEpisode,
    DatabaseEpisode,
    Demonstration,
    Environment,
    Episode,
    Message,
    StepResult,
)
from shared.errors import Busy, GivenUp, VolleyError
from shared.process import telemetry

_HUNG = telemetry.Gauge(
    "volley_env_hung_calls", "Calls that were given up and still run", ["kind"], registry=telemetry.REGISTRY
)
_log = telemetry.Log("threads")


class ThreadRunner:
    """Threads for calls into environments, a separate group for each kind.

    Args:
        n_threads: threads of one kind of environment.
        deadline_s: longest time that a client waits for a call.
        max_waiting: calls of one kind that may wait or run at once.
    """

    def __init__(self, n_threads: int, deadline_s: float, max_waiting: int) -> None:
        self.deadline_s = deadline_s
        self._n_threads, self._max_waiting = n_threads, max_waiting
        self._groups: dict[str, _ThreadGroup] = {}

    async def run[T](self, name: str, kind: str, call: Call, function: Callable[[], T]) -> T:
        """Run `function` in a thread of `kind`.

        Raises the environment's VolleyErrors unchanged, Busy, GivenUp, and VolleyError for a defect of the environment.
        """
        group = self._group(kind)
        if group.is_stuck:
            raise Busy(f"{name}: {group.complaint}", retry_after_s=self.deadline_s)
        if group.n_waiting >= self._max_waiting:
            raise Busy(f"{name}: {group.n_waiting} calls are waiting", "try again later", retry_after_s=2.0)
        started = time.perf_counter()
        work = group.submit(function)
        try:
            return await work.answer
        except _DeadlinePassed as late:
            if late.started:
                detail = f"{name}: {call} took longer than {self.deadline_s:g} s"
                raise GivenUp(detail, "the episode is given up") from None
            detail = f"{name}: no thread was free for {call} within {self.deadline_s:g} s"
            raise Busy(detail, "try again later") from None
        except VolleyError:
            raise
        except (Exception, SystemExit) as error:
            _log.exception("environment failed", env=name, call=call)
            cause = f"{type(error).__name__}: {str(error)[:200]}"
            raise VolleyError(f"{name}: {call} failed with {cause}", "a defect of the environment") from error
        finally:
            group.stop_waiting(work)
            call_seconds(name, call).observe(time.perf_counter() - started)

    def stuck_reason(self, kind: str) -> str | None:
        """Return why environments of `kind` cannot be used; None if they can."""
        group = self._groups.get(kind)
        return f"{kind}: {group.complaint}" if group is not None and group.is_stuck else None

    async def watch(self) -> None:
        """Worker. Raises VolleyError if all threads of a kind hang at two checks, one deadline apart."""
        stuck: set[str] = set()
        while True:
            await asyncio.sleep(self.deadline_s)
            now = {kind for kind, group in self._groups.items() if group.is_stuck}
            if hopeless := now & stuck:
                raise VolleyError("; ".join(f"{kind}: {self._groups[kind].complaint}" for kind in sorted(hopeless)))
            stuck = now

    def close(self) -> None:
        """Let idle threads end. Hung threads end with the process."""
        for group in self._groups.values():
            group.close()

    def _group(self, kind: str) -> _ThreadGroup:
        if kind not in self._groups:
            self._groups[kind] = _ThreadGroup(kind, self._n_threads, self.deadline_s)
        return self._groups[kind]


class InThreads:
    """Backend of an environment whose code is the service's own, built on first use.

    Args:
        kind: the kind whose threads it shares.
        build: makes the environment; raises InputError.
    """

    def __init__(
        self, name: str, kind: str, build: Callable[[], Environment | AsyncEnvironment], runner: ThreadRunner
    ) -> None:
        self.name, self._kind, self._runner = name, kind, runner
        self._build, self._lock = build, threading.Lock()
        self._made: Environment | AsyncEnvironment | None = None

    @property
    def environment(self) -> Environment | AsyncEnvironment:
        """The environment. Blocks while it is built; raises InputError."""
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

    async def reset(self, split: str, index: int, seed: int) -> ThreadEpisode | LoopEpisode:
        def reset() -> ThreadEpisode | LoopEpisode:
            episode: Any = self.environment.reset(split, index, seed)
            waits = inspect.iscoroutinefunction(episode.step)
            task = self.environment.task(split, index)
            return (LoopEpisode if waits else ThreadEpisode)(self, episode, task, episode.opening)

        return await self.call("reset", reset)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        return await self.call("demonstrate", lambda: self.environment.demonstration(split, index))

    @property
    def deadline_s(self) -> float:
        """Deadline of one call, in seconds."""
        return self._runner.deadline_s

    async def call[T](self, call: Call, function: Callable[[], T]) -> T:
        """Run `function` as a call into this environment. Raises what `ThreadRunner.run` does."""
        return await self._runner.run(self.name, self._kind, call, function)

    def stuck_reason(self) -> str | None:
        return self._runner.stuck_reason(self._kind)


@dataclass(frozen=True, slots=True)
class LoopEpisode:
    """An episode whose steps are coroutines."""

    backend: InThreads
    episode: AsyncEpisode
    task: str
    opening: tuple[Message, ...]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.episode.tools

    @property
    def database(self) -> None:
        return None

    async def step(self, message: Message) -> StepResult:
        name, deadline_s, began = self.backend.name, self.backend.deadline_s, time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s):
                return await self.episode.step(message)
        except TimeoutError:
            raise GivenUp(f"{name}: step took longer than {deadline_s:g} s", "the episode is given up") from None
        finally:
            call_seconds(name, "step").observe(time.perf_counter() - began)

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


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

    @property
    def database(self) -> str | None:
        return self.episode.database if isinstance(self.episode, DatabaseEpisode) else None

    async def step(self, message: Message) -> StepResult:
        return await self.backend.call("step", lambda: self.episode.step(message))

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


class _DeadlinePassed(Exception):
    """A call's deadline has passed. `started`: a thread has started the call."""

    def __init__(self, started: bool) -> None:
        self.started = started


class _Work:
    """One call.

    A single token decides between a thread, which starts the call, and the event loop, which cancels it. `ended`: no
    thread runs the call or will run it.
    """

    __slots__ = ("_token", "answer", "deadline", "ended", "error", "function", "result")

    def __init__(self, function: Callable[[], Any], answer: asyncio.Future[Any], deadline: float) -> None:
        self.function, self.answer, self.deadline = function, answer, deadline
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._token = [None]

    def claim(self) -> bool:
        """Claim the token; return False if it is claimed already. Atomic."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True


class _ThreadGroup:
    """Daemon threads of one kind of environment.

    They are daemons, because a call that never returns must not keep the process alive. Passing calls and results is
    most of a small step's cost: results that arrive together wake the event loop once, and one timer watches all
    deadlines, which are in the order of the calls.
    """

    def __init__(self, kind: str, n_threads: int, deadline_s: float) -> None:
        self.complaint = f"all {n_threads} threads hang in calls that were given up"
        self._kind, self._n_threads, self._deadline_s = kind, n_threads, deadline_s
        self._loop = asyncio.get_running_loop()
        self._given_up: list[_Work] = []
        self._running: dict[_Work, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ended: deque[_Work] = deque()
        self._waking = False
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        for i in range(n_threads):
            threading.Thread(target=self._serve, name=f"env-{kind}-{i}", daemon=True).start()

    @property
    def n_waiting(self) -> int:
        """Number of calls that wait or run."""
        return len(self._running)

    @property
    def is_stuck(self) -> bool:
        if self._given_up:
            self._given_up = [work for work in self._given_up if not work.ended]
            _HUNG.labels(self._kind).set(len(self._given_up))
        return len(self._given_up) >= self._n_threads

    def submit(self, function: Callable[[], Any]) -> _Work:
        """Queue a call. The caller calls `stop_waiting` afterwards."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the threads outlive an event loop
            self._loop, self._timer, self._waking = loop, None, False
        work = _Work(function, self._loop.create_future(), self._loop.time() + self._deadline_s)
        self._running[work] = None
        if self._timer is None:
            self._timer = self._loop.call_at(work.deadline, self._expire)
        self._queue.put(work)
        return work

    def stop_waiting(self, work: _Work) -> None:
        """Stop waiting for `work`, which is done, will never start, or is given up."""
        del self._running[work]
        if not work.ended and not work.claim():
            self._given_up.append(work)
            _HUNG.labels(self._kind).set(len(self._given_up))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(self._n_threads):
            self._queue.put(None)

    def _expire(self) -> None:
        self._timer = None
        for work in list(self._running):
            if work.deadline > self._loop.time():
                self._timer = self._loop.call_at(work.deadline, self._expire)
                return
            if not work.answer.done():
                taken_back = work.claim()
                if taken_back:
                    work.ended = True
                work.answer.set_exception(_DeadlinePassed(started=not taken_back))

    def _serve(self) -> None:
        """Main function of a thread."""
        while (work := self._queue.get()) is not None:
            if not work.claim():
                continue
            try:
                work.result = work.function()
            except BaseException as error:  # noqa: BLE001 - the event loop raises it to the caller
                work.error = error
            work.ended = True
            self._ended.append(work)
            if not self._waking:
                self._waking = True
                with suppress(RuntimeError):  # the loop is closed, so no caller waits
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Set the results on the event loop. The flag is cleared first, so that a later result wakes the loop again."""
        self._waking = False
        while self._ended:
            work = self._ended.popleft()
            if work.answer.done():
                continue
            if work.error is None:
                work.answer.set_result(work.result)
            elif isinstance(work.error, StopIteration):
                work.answer.set_exception(RuntimeError("StopIteration"))
            else:
                work.answer.set_exception(work.error)
