"""`volley.aio`: the functions of `volley_python.api` as coroutines, whose runs have coroutines too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volley_python import api
from volley_python.api import Server
from volley_python.run import Run

if TYPE_CHECKING:
    from volley_python.client.records import RunEvent


class AsyncRun:
    """One run; attributes and methods as of `Run`, those that wait or read files as coroutines."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.folder, self.name = run.folder, run.name

    def __repr__(self) -> str:
        return f"Async{self._run!r}"

    @property
    def state(self) -> str:
        return self._run.state

    async def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the run's end and return its summary; a cancelled wait stops the run. Raises as `Run.wait`."""
        try:
            return await asyncio.to_thread(self._run.wait, timeout_s)
        except asyncio.CancelledError:
            await asyncio.shield(self.stop())
            raise

    async def follow(self, poll_s: float = 0.3) -> AsyncIterator[RunEvent]:
        """Yield events as `Run.follow`."""
        events = self._run.follow(poll_s)
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            yield event

    async def stop(self) -> None:
        await asyncio.to_thread(self._run.stop)

    async def summary(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._run.summary)

    async def metrics(self) -> Any:
        return await asyncio.to_thread(self._run.metrics)

    async def trajectories(self, **filters: Any) -> Any:
        return await asyncio.to_thread(lambda: self._run.trajectories(**filters))

    async def export(self, folder: Path | str, version: str | None = None) -> Path:
        return await asyncio.to_thread(self._run.export, folder, version)


async def train(*arguments: Any, wait: bool = True, **settings: Any) -> AsyncRun:
    """Train as `volley.train`; arguments and errors as of that."""
    return await _started(api.train, arguments, settings, wait)


async def sft(*arguments: Any, wait: bool = True, **settings: Any) -> AsyncRun:
    """Train as `volley.sft`; arguments and errors as of that."""
    return await _started(api.sft, arguments, settings, wait)


async def dpo(*arguments: Any, wait: bool = True, **settings: Any) -> AsyncRun:
    """Train as `volley.dpo`; arguments and errors as of that."""
    return await _started(api.dpo, arguments, settings, wait)


async def evaluate(*arguments: Any, **settings: Any) -> dict[str, Any]:
    """Evaluate as `volley.evaluate`; arguments and errors as of that."""
    return await asyncio.to_thread(lambda: api.evaluate(*arguments, **settings))


async def serve(*arguments: Any, **settings: Any) -> Server:
    """Serve as `volley.serve`; arguments and errors as of that. The server's `stop` blocks for a second or two."""
    return await asyncio.to_thread(lambda: api.serve(*arguments, **settings))


async def _started(start: Any, arguments: tuple[Any, ...], settings: dict[str, Any], wait: bool) -> AsyncRun:
    run = AsyncRun(await asyncio.to_thread(lambda: start(*arguments, wait=False, **settings)))
    if wait:
        await run.wait()
    return run
