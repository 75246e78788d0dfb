"""Keep processes running: restart those that crash or hang, stop all at the end.

- A process that ends before its first answer, or with exit code 2 (a wrong configuration), ends the run.
- A process that ends later is restarted after a growing pause, within the bounds of `RestartPolicy`.
- A process that no longer answers is killed; this counts as a crash.
- At its end the context stops all processes concurrently, each within its grace.
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
    fails rarely, or a run that makes steps between failures, is restarted without limit. The first restart comes after
    `pause_s` seconds, each further one in the window after twice as long, at most `longest_pause_s`. A process is
    probed every `probe_s` seconds, and killed after `hung_s` seconds without an answer.
    """

    restarts: int = 5
    window_s: float = 600.0
    pause_s: float = 0.5
    longest_pause_s: float = 30.0
    probe_s: float = 5.0
    hung_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """One process to keep running.

    `probe` tells if it answers. `start_s`: seconds until its first answer. `prepare` is called before each start.
    `mend` is called when the process ended before its first answer; if it returns True, the process is started again.
    """

    spec: ProcessSpec
    probe: Probe
    start_s: float
    prepare: Callable[[], object] = lambda: None
    mend: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """Unexpected end of a process.

    `code`: exit code, negative for a signal. `hung_s`: set if it was killed after so many seconds without an answer.
    """

    name: str
    code: int
    hung_s: float | None = None

    def __str__(self) -> str:
        silence = "" if self.hung_s is None else f" after {self.hung_s:g} s without an answer"
        return f"{self.name} ended with {_describe(self.code)}{silence}"


class Supervision:
    """A process under supervision. `up` is set after its first answer; `ends` lists its unexpected ends."""

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
        """Start and restart the process. Returns only after `Reaper.kill_all`.

        Raises ServiceFailed, or ConfigError if the process refuses its configuration.
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
        """Wait until the process answers; False if it ends first."""
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
        """Wait until the process ends, kill it if it hangs, and add its service time."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(child))
            code = await child.wait()
            hung_s = self._patience.hung_s if watch.done() else None
            watch.cancel()
        self._served_s += time.monotonic() - began
        return ProcessEnd(self.name, code, hung_s)

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
        """Seconds before the next restart; None if the restarts are used up."""
        patience, recent = self._patience, self._restarts
        while recent and self._served_s - recent[0][0] > patience.window_s:
            recent.popleft()
        progress = max([self._progress(), *(at for _, at in recent)])  # redone steps are no progress
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
    *,
    waits: bool = True,
) -> AsyncIterator[list[Supervision]]:
    """Keep the processes running inside the context, whose body starts when all have answered once, if it `waits`.

    Raises ServiceFailed or ConfigError in an ExceptionGroup when a process is not restarted.
    """
    async with asyncio.TaskGroup() as group:
        kept = [Supervision(member, reaper, say, patience, seen, progress) for member in members]
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


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
