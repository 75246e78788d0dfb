"""Keeps processes alive: waits until each answers, restarts what crashed or hangs within bounds, stops all at the end.

- A process that ends before it ever answered, or with exit code 2 (a wrong configuration), ends the run.
- One that ends later is restarted after a growing pause, within the bounds of `RestartPolicy`.
- One that no longer answers is killed, which is then the same as a crash.
- The context stops what it started, concurrently, each within its grace.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError, VolleyError
from volley.local.processes import Child, ProcessSpec, Reaper, last_error

_PROBE_EVERY_S = 0.2
_CONFIG_EXIT = 2

type Probe = Callable[[], Awaitable[bool]]
type Say = Callable[[str], None]

ServiceState = Literal["pending", "starting", "up", "stopping", "down"]
type Seen = Callable[[str, ServiceState], None]
"""Told of each process by name: it is to be started, is started, answers, is being stopped, has ended."""


def unseen(name: str, state: ServiceState) -> None:
    """Nobody looks."""


type Progress = Callable[[], int]
"""A number that grows as the run goes on, such as its durable steps."""


def no_progress() -> int:
    """Of processes that serve no run."""
    return 0


class ServiceFailed(VolleyError):
    """A process of the run is gone for good."""

    title = "Service failed"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a process is started again, and how long it may be silent.

    At most `restarts` in `window_s` seconds of service without progress of the run. The time to get ready does not
    count, so a process that takes long to start and crashes at once is given up all the same; one that fails rarely
    goes on for ever, as does a run that makes steps between its failures. The first restart comes after `pause_s`
    seconds, each further one in the window after twice as long, at most `longest_pause_s`. A process is asked every
    `probe_s` seconds; one that has not answered for `hung_s` seconds is killed.
    """

    restarts: int = 5
    window_s: float = 600.0
    pause_s: float = 0.5
    longest_pause_s: float = 30.0
    probe_s: float = 5.0
    hung_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """One process to keep: how to start it, how to see that it answers, how long that may take in seconds.

    `prepare` is called before each start. `mend` is called when the process ended before it answered: True if it
    removed the cause, so that the process is started again.
    """

    spec: ProcessSpec
    probe: Probe
    start_s: float
    prepare: Callable[[], object] = lambda: None
    mend: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended that was up and nobody stopped. `code` is its exit code, negative for a signal; `hung_s` is
    set if it was killed after so many seconds without an answer.
    """

    name: str
    code: int
    hung_s: float | None = None

    def __str__(self) -> str:
        silence = "" if self.hung_s is None else f" after {self.hung_s:g} s without an answer"
        return f"{self.name} ended with {_describe(self.code)}{silence}"


class Supervision:
    """A process under supervision. `up` is set once it has answered for the first time; `ends` grows with each end."""

    def __init__(
        self,
        member: SupervisedProcess,
        reaper: Reaper,
        say: Say,
        patience: RestartPolicy,
        seen: Seen = unseen,
        progress: Progress = no_progress,
    ) -> None:
        self.member, self._reaper, self._say, self._patience, self._seen = member, reaper, say, patience, seen
        self._progress = progress
        self.up = asyncio.Event()
        self.child: Child | None = None
        self.ends: list[ProcessEnd] = []
        self._restarts: deque[tuple[float, int]] = deque()  # when, in seconds of service, and at which progress
        self._served_s = 0.0

    @property
    def name(self) -> str:
        return self.member.spec.name

    async def run(self) -> None:
        """Ends only when all was killed on request. Raises ServiceFailed, or ConfigError if the process refuses its
        configuration.
        """
        while True:
            self._seen(self.name, "starting")
            self.member.prepare()
            self.child = child = await Child.start(self.member.spec, self._reaper)
            try:
                answered = await self._until_up(child)
                end = await self._until_end(child)
            except asyncio.CancelledError:
                self._seen(self.name, "stopping")
                raise
            finally:
                await child.stop()
                self._seen(self.name, "down")
            if self._reaper.closed:
                return
            if answered or not self.member.mend():
                await self._before_restart(child, end)

    async def _until_up(self, child: Child) -> bool:
        """Wait until it answers; False if it has ended."""
        deadline = time.monotonic() + self.member.start_s
        while child.exit_code is None and not await self.member.probe():
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{self.name} did not answer within {self.member.start_s:g} s{_log_end(child)}")
            await asyncio.sleep(_PROBE_EVERY_S)
        if child.exit_code is not None:
            return False
        self.up.set()
        self._seen(self.name, "up")
        return True

    async def _until_end(self, child: Child) -> ProcessEnd:
        """How it ends, in the end; kills it if it hangs. Counts the service time."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(child))
            code = await child.wait()
            hung_s = self._patience.hung_s if watch.done() else None
            watch.cancel()
        self._served_s += time.monotonic() - began
        return ProcessEnd(self.name, code, hung_s)

    async def _watch(self, child: Child) -> None:
        """Silence is counted in probes that failed, not on the clock: it is not the service's if we were paused
        ourselves.
        """
        silent, patience = 0, self._patience
        while silent * patience.probe_s < patience.hung_s:
            began = time.monotonic()
            silent = 0 if await self._answers() else silent + 1
            await asyncio.sleep(began + patience.probe_s - time.monotonic())
        self._say(f"{self.name} has not answered for {patience.hung_s:g} s; killing it")
        child.kill()

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(self._patience.probe_s):
                return await self.member.probe()
        except TimeoutError:
            return False

    async def _before_restart(self, child: Child, end: ProcessEnd) -> None:
        if end.code == _CONFIG_EXIT:
            raise ConfigError(last_error(child.spec.log, child.log_start) or f"{self.name} refuses its configuration")
        if not self.up.is_set():
            raise ServiceFailed(f"{end} before it was ready{_log_end(child)}")
        self.ends.append(end)
        pause_s = self._next_pause_s()
        if pause_s is None:
            bound = f"{self._patience.restarts} restarts in {self._patience.window_s:g} s of service without progress"
            raise ServiceFailed(f"{end} again after {bound}{_log_end(child)}")
        self._say(f"{end}; restarting it in {pause_s:g} s")
        await asyncio.sleep(pause_s)

    def _next_pause_s(self) -> float | None:
        """None when patience is at its end."""
        patience, recent = self._patience, self._restarts
        while recent and self._served_s - recent[0][0] > patience.window_s:
            recent.popleft()
        progress = max([self._progress(), *(at for _, at in recent)])  # steps that are undone and made again are none
        if sum(at == progress for _, at in recent) >= patience.restarts:
            return None
        recent.append((self._served_s, progress))
        return min(patience.longest_pause_s, patience.pause_s * 2.0 ** min(len(recent) - 1, 32))


@asynccontextmanager
async def keep_running(
    members: Sequence[SupervisedProcess],
    reaper: Reaper,
    say: Say,
    patience: RestartPolicy = RestartPolicy(),
    seen: Seen = unseen,
    progress: Progress = no_progress,
) -> AsyncIterator[list[Supervision]]:
    """Keeps the processes alive for the length of the context, which begins when all of them have answered once.

    Raises, in an ExceptionGroup, ServiceFailed or ConfigError when one of them is gone for good.
    """
    async with asyncio.TaskGroup() as group:
        kept = [Supervision(member, reaper, say, patience, seen, progress) for member in members]
        tasks = [group.create_task(one.run()) for one in kept]
        try:
            for one in kept:
                await one.up.wait()
            yield kept
        finally:
            for task in tasks:
                task.cancel()


def _log_end(child: Child) -> str:
    """What the process said last, for an error message."""
    found = last_error(child.spec.log, child.log_start)
    return f": {found} (log: {child.spec.log})" if found else f" (log: {child.spec.log})"


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
