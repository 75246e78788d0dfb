"""Keeps processes alive: waits until each answers, restarts the crashed ones within bounds, stops all at the end.

- A process that ends before it ever answered, or with exit code 2 (a wrong configuration), ends the run.
- One that ends later is restarted after a growing pause, within the bounds of `Patience`.
- The context stops what it started, concurrently, each within its grace.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.cli.processes import Child, Reaper, Spec, last_error
from shared.errors import ConfigError, VolleyError

_PROBE_EVERY_S = 0.2
_CONFIG_EXIT = 2

type Probe = Callable[[], Awaitable[bool]]
type Say = Callable[[str], None]


class ServiceFailed(VolleyError):
    """A process of the run is gone for good."""

    title = "Service failed"


@dataclass(frozen=True, slots=True)
class Patience:
    """At most `restarts` in `window_s` seconds, the first after `pause_s` seconds, each later one after twice as long as the one before."""

    restarts: int = 5
    window_s: float = 600.0
    pause_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Member:
    """One process to keep: how to start it, how to see that it answers, how long that may take in seconds."""

    spec: Spec
    probe: Probe
    start_s: float


class Kept:
    """A process under supervision. `up` is set once it has answered for the first time."""

    def __init__(self, member: Member, reaper: Reaper, say: Say, patience: Patience) -> None:
        self.member, self._reaper, self._say, self._patience = member, reaper, say, patience
        self.up = asyncio.Event()
        self.child: Child | None = None
        self._restarts: deque[float] = deque()

    @property
    def name(self) -> str:
        return self.member.spec.name

    async def run(self) -> None:
        """Ends only when all was killed on request. Raises ServiceFailed, or ConfigError if the process refuses its configuration."""
        while True:
            self.child = await Child.start(self.member.spec, self._reaper)
            try:
                await self._until_up(self.child)
                code = await self.child.wait()
            finally:
                await self.child.stop()
            if self._reaper.closed:
                return
            await self._before_restart(code)

    async def _until_up(self, child: Child) -> None:
        deadline = time.monotonic() + self.member.start_s
        while child.exit_code is None and not await self.member.probe():
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{self.name} did not answer within {self.member.start_s:g} s{self._log_end()}")
            await asyncio.sleep(_PROBE_EVERY_S)
        if child.exit_code is None:
            self.up.set()

    async def _before_restart(self, code: int) -> None:
        if code == _CONFIG_EXIT:
            raise ConfigError(last_error(self.member.spec.log) or f"{self.name} refuses its configuration")
        ended = f"{self.name} ended with {_describe(code)}"
        if not self.up.is_set():
            raise ServiceFailed(f"{ended} before it was ready{self._log_end()}")
        now, patience = time.monotonic(), self._patience
        while self._restarts and now - self._restarts[0] > patience.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= patience.restarts:
            raise ServiceFailed(f"{ended} again after {patience.restarts} restarts in {patience.window_s:g} s{self._log_end()}")
        pause_s = patience.pause_s * 2 ** len(self._restarts)
        self._restarts.append(now)
        self._say(f"{ended}; restarting it in {pause_s:g} s")
        await asyncio.sleep(pause_s)

    def _log_end(self) -> str:
        found = last_error(self.member.spec.log)
        return f": {found} (log: {self.member.spec.log})" if found else f" (log: {self.member.spec.log})"


@asynccontextmanager
async def keeping(members: Sequence[Member], reaper: Reaper, say: Say, patience: Patience = Patience()) -> AsyncIterator[list[Kept]]:
    """Keeps the processes alive for the length of the context, which begins when all of them have answered once.

    Raises, in an ExceptionGroup, ServiceFailed or ConfigError when one of them is gone for good.
    """
    async with asyncio.TaskGroup() as group:
        kept = [Kept(member, reaper, say, patience) for member in members]
        tasks = [group.create_task(one.run()) for one in kept]
        try:
            for one in kept:
                await one.up.wait()
            yield kept
        finally:
            for task in tasks:
                task.cancel()


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
