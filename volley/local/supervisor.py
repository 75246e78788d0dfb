"""Keep processes running: restart those that crash or hang, stop all at the end.

- A process that ends with exit code 2 (a wrong configuration) ends the run.
- So does one that has never answered and ends by an error of its own, or does not answer in time.
- Any other process that ends is restarted after a growing pause, within the bounds of `RestartPolicy`: also one that a
  signal ends, or that lacks something for now (`exit_codes.AGAIN`), before its first answer.
- A process that no longer answers is killed; this counts as a crash.
- At its end the context stops all processes concurrently, each within its grace.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError, VolleyError
from shared.process.exit_codes import AGAIN, REFUSED, SIGKILL_HINT, describe, signal_of
from volley.local.processes import Child, ProcessSpec, Reaper, last_error

_PROBE_EVERY_S = 0.2

type Probe = Callable[[], Awaitable[bool]]
type Say = Callable[[str], None]

ServiceState = Literal["pending", "starting", "up", "stopping", "down"]
type Seen = Callable[[str, ServiceState], None]
"""Called with a process's name and new state: to be started, started, answers, being stopped, ended."""


def unseen(name: str, state: ServiceState) -> None:
    """Ignore the state."""


type Progress = Callable[[], int]
"""A number that grows as the run progresses, such as its durable steps."""


def no_progress() -> int:
    """Progress of processes that serve no run: always 0."""
    return 0


class ServiceFailed(VolleyError):
    """A process of the run has failed and is not restarted."""

    title = "Service failed"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Bounds on restarts and on silence of a process.

    A process is restarted at most `restarts` times in `window_s` seconds of service without progress of the run.
    Startup time does not count: a process that starts slowly and then crashes at once is also given up. A process that
    fails rarely, or a run that makes steps between failures, is restarted without limit. One that has never answered is
    restarted at most `first_restarts` times. The first restart comes after `pause_s` seconds, each further one in the
    window after twice as long, at most `longest_pause_s`. A process is probed every `probe_s` seconds, and killed after
    `hung_s` seconds without an answer.
    """

    restarts: int = 5
    first_restarts: int = 2
    window_s: float = 600.0
    pause_s: float = 0.5
    longest_pause_s: float = 30.0
    probe_s: float = 5.0
    hung_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """One process to keep running.

    `probe` returns True if it answers. `start_s`: seconds until its first answer. `prepare` is called before each
    start. `mend` is called when the process ended by an error of its own before its first answer, but not twice in a
    row, with the offset of its output in the log. If it returns True, the process is started again.
    """

    spec: ProcessSpec
    probe: Probe
    start_s: float
    prepare: Callable[[], object] = lambda: None
    mend: Callable[[int], bool] = lambda log_start: False


@dataclass(frozen=True, slots=True)
class ServiceExit:
    """Unexpected end of a process.

    `code`: exit code, negative for a signal. `hung_s`: set if it was killed after so many seconds without an answer.
    `answered`: False if it ended before its first answer.
    """

    name: str
    code: int
    hung_s: float | None = None
    answered: bool = True

    @property
    def is_outage(self) -> bool:
        """True if the cause is external or temporary, so that another start may succeed."""
        return self.hung_s is None and (self.code == AGAIN or signal_of(self.code) is not None)

    def __str__(self) -> str:
        if not self.answered and self.hung_s is not None:
            return f"{self.name} did not answer within {self.hung_s:g} s"
        silence = "" if self.hung_s is None else f" after {self.hung_s:g} s without an answer"
        return f"{self.name} ended with {describe(self.code)}{silence}{'' if self.answered else ' before it was ready'}"


class Supervision:
    """A process under supervision. `up` is set after its first answer; `ends` lists its unexpected ends.

    Args: clock: monotonic seconds, which measure service.
    """

    def __init__(
        self,
        member: SupervisedProcess,
        reaper: Reaper,
        say: Say,
        patience: RestartPolicy,
        seen: Seen = unseen,
        progress: Progress = no_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member, self._reaper, self._say, self._patience, self._seen = member, reaper, say, patience, seen
        self._progress, self._clock = progress, clock
        self.up = asyncio.Event()
        self.child: Child | None = None
        self.ends: list[ServiceExit] = []
        self._restarts: deque[tuple[float, int]] = deque()  # when, in seconds of service, and at which progress
        self._served_s = 0.0

    @property
    def name(self) -> str:
        return self.member.spec.name

    async def run(self) -> None:
        """Start and restart the process. Returns only after `Reaper.kill_all`.

        Raises ServiceFailed, or ConfigError if the process refuses its configuration.
        """
        is_mended = False
        while True:
            self._seen(self.name, "starting")
            self.member.prepare()
            self.child = child = await Child.start(self.member.spec, self._reaper)
            try:
                end = await self._until_up(child) or await self._until_end(child)
            except asyncio.CancelledError:
                self._seen(self.name, "stopping")
                raise
            finally:
                await child.stop()
                self._seen(self.name, "down")
            if self._reaper.closed:
                return
            failed = not (end.answered or end.is_outage or end.hung_s)
            is_mended = failed and not is_mended and self.member.mend(child.log_start)
            if not is_mended:
                await self._before_restart(child, end)

    async def _until_up(self, child: Child) -> ServiceExit | None:
        """Wait until the process answers; return its end if it ends first. Kill it if it does not answer in time."""
        deadline, hung_s = time.monotonic() + self.member.start_s, None
        while child.exit_code is None and not await self.member.probe():
            if time.monotonic() > deadline:
                hung_s = self.member.start_s
                child.kill()
                await child.wait()
            await asyncio.sleep(_PROBE_EVERY_S)
        if child.exit_code is not None:
            return ServiceExit(self.name, child.exit_code, hung_s, answered=False)
        self.up.set()
        self._seen(self.name, "up")
        return None

    async def _until_end(self, child: Child) -> ServiceExit:
        """Wait until the process ends, kill it if it hangs, and add its service time."""
        began = self._clock()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(child))
            code = await child.wait()
            hung_s = self._patience.hung_s if watch.done() else None
            watch.cancel()
        self._served_s += self._clock() - began
        return ServiceExit(self.name, code, hung_s)

    async def _watch(self, child: Child) -> None:
        """Kill the process if it hangs. Counts failed probes, not clock time: the supervisor may be paused itself."""
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

    async def _before_restart(self, child: Child, end: ServiceExit) -> None:
        if end.code == REFUSED:
            raise ConfigError(last_error(child.spec.log, child.log_start) or f"{self.name} refuses its configuration")
        if not (self.up.is_set() or end.is_outage):
            raise ServiceFailed(f"{end}{_log_end(child)}")
        self.ends.append(end)
        pause_s = self._next_pause_s()
        if pause_s is None:
            raise ServiceFailed(f"{end}, after {self._bound()}{_log_end(child)}", _hint(end))
        found = last_error(child.spec.log, child.log_start) if end.code > 0 else ""
        self._say(f"{end}{found and f': {found}'}; restarting it in {pause_s:g} s")
        await asyncio.sleep(pause_s)

    def _bound(self) -> str:
        """Describe how often the process has been restarted."""
        if not self.up.is_set():
            return f"{self._patience.first_restarts} restarts"
        return f"{self._patience.restarts} restarts in {self._patience.window_s:g} s of service without progress"

    def _next_pause_s(self) -> float | None:
        """Seconds before the next restart; None if the restarts are used up."""
        patience, recent = self._patience, self._restarts
        while recent and self._served_s - recent[0][0] > patience.window_s:
            recent.popleft()
        progress = max([self._progress(), *(at for _, at in recent)])  # redone steps are no progress
        most = patience.restarts if self.up.is_set() else patience.first_restarts
        if sum(at == progress for _, at in recent) >= most:
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
    *,
    waits: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[list[Supervision]]:
    """Keep the processes running inside the context, whose body starts when all have answered once, if it `waits`.

    Raises ServiceFailed or ConfigError in an ExceptionGroup when a process is not restarted.
    """
    async with asyncio.TaskGroup() as group:
        kept = [Supervision(member, reaper, say, patience, seen, progress, clock) for member in members]
        tasks = [group.create_task(one.run()) for one in kept]
        try:
            for one in kept if waits else ():
                await one.up.wait()
            yield kept
        finally:
            for task in tasks:
                task.cancel()


def _log_end(child: Child) -> str:
    """Last error of the process and its log file, to end an error message."""
    found = last_error(child.spec.log, child.log_start)
    return f": {found} (log: {child.spec.log})" if found else f" (log: {child.spec.log})"


def _hint(end: ServiceExit) -> str:
    return SIGKILL_HINT if end.hung_s is None and signal_of(end.code) == signal.SIGKILL else ""
