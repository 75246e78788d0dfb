"""State of a running run's services, and its changes as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import orjson

from shared.errors import VolleyError
from shared.run.folder import RunFolder
from volley_dashboard.page.state import state_of, trainer
from volley_python.client.run_reader import RunReader
from volley_python.diagnosis.observing import described, of_run

_POLL_S = 1.0
_FLEET_S = 3.0
_PATIENCE_S, _FRESH_S = 0.5, 20.0
_COMMENT_S = 15.0
_LONG_S, _STEPS_A_SECOND = 5.0, 1000


class FleetReports:
    """Reports of a run's services, asked at most once in `_FLEET_S` whoever looks."""

    def __init__(self, files: RunReader) -> None:
        self._files = files
        self._lock = asyncio.Lock()
        self._asked, self._answer = -_FRESH_S, dict[str, Any]()
        self._answered_in = 0

    async def report(self) -> Mapping[str, Any]:
        """Describe the services (volley_python.diagnosis.observing); `state` is that of the run."""
        async with self._lock:
            if time.monotonic() - self._asked >= _FLEET_S:
                self._answer = await self._ask()
                self._asked = time.monotonic()
            return self._answer

    async def state(self) -> str:
        """Return the state of the run; that of the last report if the services take more than `_PATIENCE_S`."""
        recorded = await asyncio.to_thread(lambda: self._files.state)
        if recorded != "running":
            return recorded
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self.report()
        return self._answer["state"] if time.monotonic() - self._asked < _FRESH_S else recorded

    async def _ask(self) -> dict[str, Any]:
        folder = self._files.folder
        try:
            seen, verdict = await of_run(folder)
        except VolleyError as error:
            return {"state": "running", "chain": [str(error)], "warnings": [], "services": []}
        found = described(seen, verdict)
        start = await asyncio.to_thread(_start_of, folder)
        if trainer(found):
            self._answered_in = start
        recorded = await asyncio.to_thread(lambda: self._files.state)
        return found | {"state": state_of(recorded, found, has_answered=self._answered_in == start)}


def _start_of(folder: RunFolder) -> int:
    """Return a number that changes when the run is started again."""
    with suppress(OSError):
        return folder.processes.stat().st_mtime_ns
    return -1


def edition(revision: int | None, state: str) -> str:
    """Return a text that is another one if the page of the run is to be drawn again.

    Args:
        revision: that of the run's reader; None if it has read only a sample.
        state: by the files.
    """
    return f"{revision}-{state}"


def _newest(files: RunReader) -> tuple[str, str]:
    """Read new lines, and return the run's edition and state."""
    files.refresh()
    state = files.state
    return edition(files.revision, state), state


def _pace(files: RunReader) -> float:
    """Return the least time between two drawings of a run: each step moves the curves of a long run less."""
    return min(_LONG_S, files.n_steps / _STEPS_A_SECOND)


async def events(files: RunReader, fleet: FleetReports, ended: asyncio.Event, seen: str) -> AsyncIterator[bytes]:
    """Yield server-sent events until `ended`.

    `records`: the run's page is to be drawn again; `fleet`: state of the services, while the run is worked on. Comments
    keep the connection open.

    Args:
        seen: edition that was drawn.
    """
    spoke, before = time.monotonic(), b""
    drawn, state = -_LONG_S, ""
    while not ended.is_set():
        sent = False
        newest, now = await asyncio.to_thread(_newest, files)
        if newest != seen and (now != state or time.monotonic() - drawn >= _pace(files)):
            seen, state, drawn = newest, now, time.monotonic()
            yield b"event: records\ndata: {}\n\n"
            sent = True
        if await asyncio.to_thread(lambda: files.is_held):
            now = orjson.dumps(await fleet.report(), default=str)
            if now != before:
                yield b"event: fleet\ndata: " + now + b"\n\n"
                before, sent = now, True
        if sent:
            spoke = time.monotonic()
        elif time.monotonic() - spoke > _COMMENT_S:
            yield b": nothing new\n\n"
            spoke = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await ended.wait()
