"""State of a running run's services, and its changes as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson

from shared.errors import VolleyError
from shared.run.folder import RunFolder
from volley.reporting.run_reader import RunReader
from volley.runs.observing import described, of_run

_POLL_S = 1.0
_FLEET_S = 3.0
_COMMENT_S = 15.0


class FleetReports:
    """Reports of a run's services, asked at most once in `_FLEET_S` whoever looks."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._asked, self._answer = -_FLEET_S, dict[str, Any]()

    async def report(self) -> Mapping[str, Any]:
        async with self._lock:
            if time.monotonic() - self._asked >= _FLEET_S:
                self._answer = await self._ask()
                self._asked = time.monotonic()
            return self._answer

    async def _ask(self) -> dict[str, Any]:
        try:
            seen, verdict = await of_run(self._folder)
        except VolleyError as error:
            return {"state": "unknown", "chain": [str(error)], "warnings": [], "services": []}
        return described(seen, verdict)


async def events(files: RunReader, fleet: FleetReports, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield server-sent events until `ended`.

    `records`: the run's files have new lines; `fleet`: state of the services, while the run is worked on. Comments keep
    the connection open.
    """
    spoke, before = time.monotonic(), b""
    while not ended.is_set():
        sent = False
        if await asyncio.to_thread(files.refresh):
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
        try:
            async with asyncio.timeout(_POLL_S):
                await ended.wait()
        except TimeoutError:
            pass
