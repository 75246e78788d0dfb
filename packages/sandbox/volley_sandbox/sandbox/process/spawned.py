"""A sandbox's process as the service sees it, and what such processes come from: a zygote, or containers."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from volley_sandbox.sandbox.tier import Tier

type ProcessSignal = Literal["kill", "pause", "resume"]


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a sandbox's process. `error` is set if it never started or its end is unknown."""

    status: int | None = None
    cpu_s: float = 0.0
    max_rss_mb: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a sandbox's channel and log: `channel` and `log` are the service's."""

    channel: socket.socket
    log: io.FileIO
    other_channel: socket.socket
    other_log: io.FileIO


@contextmanager
def open_ends() -> Iterator[Ends]:
    """Open a channel and a log; close the other process's ends at exit, and all after an error. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            ours.setblocking(False)
            reader, writer = os.pipe()
            with io.FileIO(writer, "wb") as other_log:
                log = io.FileIO(reader, "rb")
                try:
                    yield Ends(ours, log, theirs, other_log)
                except BaseException:
                    log.close()
                    raise
        except BaseException:
            ours.close()
            raise


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class SpawnedProcess:
    """A sandbox's process.

    `channel` carries requests and answers, `log` its output; the sandbox closes them. `pid` is its process id as the
    zygote sees it; namespaces make it differ from the service's view. `door` is the socket that listens in an agent's
    sandbox.
    """

    channel: socket.socket
    log: io.FileIO
    pid: asyncio.Future[int] = field(default_factory=_future)
    end: asyncio.Future[ProcessEnd] = field(default_factory=_future)
    door: asyncio.Future[socket.socket] = field(default_factory=_future)

    def close(self) -> None:
        """Close the channel and the log of a process that no sandbox has taken."""
        self.channel.close()
        self.log.close()

    def forget(self) -> None:
        """Settle what can no longer come."""
        if not self.pid.done():
            self.pid.cancel()
        if not self.door.done():
            self.door.cancel()


class Spawner(Protocol):
    """Source of sandboxes' processes. `tmp` is the folder of each in its own namespaces, None if they have none."""

    @property
    def tmp(self) -> str | None: ...

    @property
    def tier(self) -> Tier: ...

    async def spawn(self, number: int, limits: Mapping[str, int], tmp: str) -> SpawnedProcess:
        """Start a process. Raises Unavailable, RateLimited, OSError (no descriptors left)."""
        ...

    def signal(self, number: int, what: ProcessSignal) -> None:
        """Kill, pause or resume a process, in the order of calls. One that has ended is ignored."""
        ...
