"""Sampling from clients' saved weights with rollout servers, which serve one version at a time.

Requests for the weights that a server has run at once; for others it is drained and loads them. The oldest waiting
request decides which. A result counts only if every token was sampled by the weights that were asked for.

Invariants: a request is answered once; a server that restarts, or that serves other weights, costs time only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from shared.clients.base import HttpClient
from shared.errors import OutOfMemory, Unavailable, VolleyError, WeightsError, first_error
from shared.process import telemetry
from volley_tinker.server import samples
from volley_tinker.server.entries import Checkpoint, Future, RequestResult, failed
from volley_tinker.server.samples import SampleRequest

_BASE = "base"
_WAIT_S, _LOAD_S, _SAMPLE_S = 1.0, 900.0, 3600.0
_MOST_AT_ONCE = 64
_MOST_OBJECTS = 4_000_000
_log = telemetry.Log("tinker")

type Export = Callable[[Checkpoint | None, str], Awaitable[Path]]
type Settle = Callable[[Future, RequestResult], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class SampleTask:
    """A recorded request with the weights that it wants, None for the base."""

    future: Future
    checkpoint: Checkpoint | None

    @property
    def version(self) -> str:
        return version_of(self.checkpoint)


def version_of(checkpoint: Checkpoint | None) -> str:
    """Name weights for a rollout server by their content, so those of a replaced checkpoint keep their name."""
    if checkpoint is None:
        return _BASE
    return f"t-{hashlib.sha256(checkpoint.digest.encode()).hexdigest()[:24]}"


@dataclass
class SampleServer:
    """One rollout server and the requests that wait for it.

    Args:
        client: of the server, with its admin token.
        context: most tokens of prompt and answer.
        export: writes weights where the server may read them.
        settle: records a result.
    """

    client: HttpClient
    context: int
    export: Export
    settle: Settle
    _waiting: deque[SampleTask] = field(default_factory=deque[SampleTask])
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _loaded: str | None = None
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_AT_ONCE))

    def add(self, task: SampleTask) -> None:
        self._waiting.append(task)
        self._arrived.set()

    async def run(self) -> None:
        """Worker that answers requests until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                try:
                    await self._turn(self._waiting[0].version)
                except VolleyError as error:
                    await self._not_loaded(error)

    async def _turn(self, version: str) -> None:
        """Answer the waiting requests for one version, and those that arrive before one for another waits.

        Raises VolleyError if the server cannot load it.
        """
        await self._load(self._waiting[0])
        async with asyncio.TaskGroup() as group:
            running = set[asyncio.Task[None]]()
            while True:
                mine = [task for task in self._waiting if task.version == version]
                self._waiting = deque(task for task in self._waiting if task.version != version)
                for task in mine:
                    one = group.create_task(self._answer(task))
                    running.add(one)
                    one.add_done_callback(running.discard)
                if self._waiting or not running or self._loaded != version:
                    return
                arrival = group.create_task(self._arrived.wait())
                await asyncio.wait([arrival, *running], return_when=asyncio.FIRST_COMPLETED)
                arrival.cancel()
                self._arrived.clear()

    async def _load(self, task: SampleTask) -> None:
        found = await self.client.get("/weights")
        self._loaded = task.version
        if found["current"] == task.version:
            return
        self._loaded = None
        folder = await self.export(task.checkpoint, task.version)
        body = {"model_path": str(folder), "weight_version": task.version, "abort_all_requests": True}
        done = await self.client.post("/update_weights_from_disk", body, timeout_s=_LOAD_S)
        self._loaded = task.version
        _log.info("sampler loaded", version=task.version, timings=done.get("timings"))

    async def _not_loaded(self, error: VolleyError) -> None:
        """Fail the oldest request if its weights cannot be served; otherwise wait for the server."""
        if isinstance(error, Unavailable) and not isinstance(error, OutOfMemory):
            _log.warning("sampler waits for its server", reason=str(error))
            await asyncio.sleep(_WAIT_S)
            return
        task = self._waiting.popleft()
        _log.error("sampler cannot load weights", version=task.version, reason=str(error))
        await self.settle(task.future, failed(WeightsError(f"the rollout server cannot load the weights: {error}")))

    async def _answer(self, task: SampleTask) -> None:
        """Sample and settle; put the request back if the server was lost or serves other weights."""
        try:
            made = await self._sampled(task)
        except Unavailable as error:
            _log.warning("sample repeated", future=task.future.id, reason=str(error))
            await asyncio.sleep(_WAIT_S)
            self._loaded = None
            self.add(task)
            return
        except VolleyError as error:
            made = failed(error)
        await self.settle(task.future, made)

    async def _sampled(self, task: SampleTask) -> RequestResult:
        """Raises Unavailable, also if other weights sampled a token, and InputError."""
        assert task.future.body is not None
        request = samples.sample_request(orjson.loads(task.future.body), self.context)
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._call(request, i)) for i in range(request.num_samples)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        answers = [call.result() for call in calls]
        if others := _versions(answers) - {task.version}:
            raise Unavailable(f"{min(others)} sampled in place of {task.version}")
        return RequestResult("done", samples.result(request, answers))

    async def _call(self, request: SampleRequest, i: int) -> Any:
        async with self._room:
            body = request.call(i)
            return await self.client.post("/generate", body, timeout_s=_SAMPLE_S, max_objects=_MOST_OBJECTS)


def _versions(answers: Sequence[Any]) -> set[str]:
    return {str(span["version"]) for one in answers for span in one["meta_info"]["weight_versions"]}
