"""Client of the engine's process: starts it and implements `engines.base.Engine`.

Inside the engine every request has a name that is never reused: a late answer cannot reach a newer request to which a
caller gave the same id, and aborting one id cannot hit another.

The engine runs in a child process, so it never shares an interpreter lock with the HTTP server, and its death does not
end the service's process. Every call waits for a future that the link's messages resolve; the future fails with
EngineDied when the link closes. A process that falls silent (see `link`) is killed, so no call waits for ever. Queries
and aborts wait at most `ANSWER_S`: an engine that compiles answers nothing until the step is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np

from services.rollout.engines.base import (
    Arriving,
    EngineInfo,
    EngineSpec,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    NewTokens,
    OnTokens,
    ScoredTokens,
    TopTokens,
)
from services.rollout.engines.sglang_jax.link import BEAT_S, Message, frame, split, with_tuples
from services.rollout.engines.sglang_jax.model_files import check_split, normalised
from services.rollout.engines.sglang_jax.process import boot_failure, death, spawn
from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from shared.errors import Conflict, EngineDied, NotReady, Unavailable, VolleyError, from_problem
from shared.models.config import ModelConfig
from shared.routing import from_wire
from shared.types import VersionSpan

WORKER = "services.rollout.engines.sglang_jax.worker"
CLOSE_GRACE_S = 3.0
BOOT_S = 1800.0
SILENCE_S = 30.0
ANSWER_S = 120.0
_PYTHON_START_BEATS = 60
_NO_CALL = -1  # a message whose answer nobody waits for


class SglangEngine(asyncio.Protocol):
    """Implements `engines.base.Engine`; `open_engine` starts it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[str, asyncio.Future[GenerateResult]] = {}
        self._receivers: dict[str, OnTokens] = {}
        self._names: dict[str, str] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._missed = -_PYTHON_START_BEATS
        self._cause: VolleyError | None = None
        self._has_weights = False

    @property
    def info(self) -> EngineInfo:
        return self._ready.result()

    @property
    def silent_s(self) -> float:
        return max(0, self._missed) * BEAT_S

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        if not self._has_weights:
            raise self._without_weights()
        if request.rid in self._names:
            raise Conflict(f"a request {request.rid!r} is running", "give every request its own rid")
        future, name = self._future(), f"r{next(self._numbers)}"
        self._running[name], self._names[request.rid] = future, name
        if on_tokens is not None:
            self._receivers[name] = on_tokens
        self._send(generate_message(name, request, streamed=on_tokens is not None))
        try:
            return dataclasses.replace(await future, rid=request.rid, prompt_tokens=len(request.input_ids))
        finally:
            del self._running[name], self._names[request.rid]
            self._receivers.pop(name, None)
            if future.cancelled():
                self._abandon(name)

    def _abandon(self, name: str) -> None:
        """Abort a request whose result nobody waits for."""
        self._send({"op": "abort", "rid": name, "call": _NO_CALL})

    async def score(self, ids: np.ndarray, top_logprobs: int = 0) -> ScoredTokens:
        if not self._has_weights:
            raise self._without_weights()
        answer = await self._call("score", ids=ids, top_logprobs=top_logprobs)
        return ScoredTokens(answer["version"], answer["logprobs"], _top(answer, len(answer["logprobs"])))

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        fields, number = dataclasses.asdict(weights) | {"arriving": arriving is not None}, next(self._numbers)
        staging = asyncio.ensure_future(self._numbered(number, "stage", **fields))
        try:
            if arriving is not None:
                await asyncio.wait({staging, arriving}, return_when=asyncio.FIRST_COMPLETED)
                if not staging.done():
                    arriving.result()
                    self._send({"op": "arrived", "call": _NO_CALL, "of": number})
            loaded = LoadedWeights(**await staging)
            if arriving is not None:
                await arriving
            return loaded
        except BaseException:  # nobody waits for the staged weights any more
            if staging.done() and not staging.cancelled():
                staging.exception()
            staging.cancel()
            self._send({"op": "forget", "call": _NO_CALL, "of": number})
            raise

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        answer = await self._call("commit", version=version, mode=mode)
        self._has_weights = True
        return CommitResult(**answer | {"live": Live(**answer["live"])})

    async def audit(self) -> Live:
        return Live(**await self._ask("audit"))

    async def status(self) -> EngineStatus:
        return EngineStatus(**await self._ask("status"))

    async def abort(self, rid: str | None) -> int:
        if rid is not None and rid not in self._names:
            return 0
        return await self._ask("abort", rid=None if rid is None else self._names[rid])

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def flush_cache(self) -> None:
        await self._call("flush")

    async def wait_closed(self) -> None:
        await self._attend(self._ended)

    async def close(self) -> None:
        """End the engine: by closing the link, or by SIGKILL if it has not started or does not end."""
        self._closing = True
        self._transport.close()
        if not self._ready.done():
            self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    # --- the link ---------------------------------------------------------------------------------------------------

    async def start(self, spec: EngineSpec) -> None:
        """Send the spec and wait until the engine is up.

        Raises the error that ended the engine, or EngineDied if it ended without one.
        """
        self._has_weights = spec.load_weights
        self._send({"op": "start", "spec": dataclasses.asdict(spec)})
        try:
            async with asyncio.timeout(BOOT_S):
                await self._attend(self._ready)
        except TimeoutError:
            raise EngineDied(
                f"the engine did not start within {BOOT_S:g} s", "its log says what it was doing"
            ) from None
        except EngineDied:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its exit code comes after the end of the link
                await asyncio.to_thread(self._process.wait, CLOSE_GRACE_S)
            raise boot_failure(self._process, self._cause) from None

    async def _attend(self, future: asyncio.Future[Any]) -> None:
        """Wait for `future`; kill the process once it has been silent for `SILENCE_S`.

        Silence is counted in periods of this loop without a beat, so time in which the whole service stood still does
        not count.
        """
        while not (await asyncio.wait({future}, timeout=BEAT_S))[0]:
            self._missed += 1
            if self.silent_s >= SILENCE_S:
                self._cause = EngineDied(f"it was silent for {self.silent_s:g} s and was killed")
                self._process.kill()
        future.result()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for message in split(self._buffer):
            self._handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every waiting call."""
        error = death(self._process, self._cause)
        for future in (*self._calls.values(), *self._running.values(), self._ready):
            if not future.done():
                future.set_exception(error)
                future.exception()
        if self._closing:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()

    def _handle(self, message: Message) -> None:
        match message["op"]:
            case "tokens":
                for new in message["new"]:
                    self._deliver(new)
            case "done":
                for result in message["results"]:
                    _settle(self._running.get(result["rid"]), result, _result)
            case "reply":
                _settle(self._calls.pop(message["call"], None), message, itemgetter("value"))
            case "beat":
                self._missed = 0
            case "ready":
                self._ready.set_result(EngineInfo(**with_tuples(message["info"])))
            case "fatal":
                self._cause = from_problem(500, message["error"])
            case other:
                raise AssertionError(f"unknown message {other!r}")

    def _deliver(self, message: Message) -> None:
        """Hand a step's tokens to the request's receiver; if that raises, so does `generate`."""
        name = message["rid"]
        receiver, future = self._receivers.get(name), self._running.get(name)
        if receiver is None or future is None or future.done():
            return
        ids = message["output_ids"]
        try:
            receiver(NewTokens(ids, message["logprobs"], _top(message, len(ids)), message["version"]))
        except Exception as error:  # noqa: BLE001 - the caller's own error, handed to the caller
            future.set_exception(error)
            self._abandon(name)

    def _without_weights(self) -> NotReady:
        return NotReady("no weights are committed yet", "retry when /ready answers 200")

    async def _call(self, op: str, **fields: Any) -> Any:
        return await self._numbered(next(self._numbers), op, **fields)

    async def _numbered(self, number: int, op: str, **fields: Any) -> Any:
        future = self._calls[number] = self._future()
        self._send({"op": op, "call": number, **fields})
        return await future

    async def _ask(self, op: str, **fields: Any) -> Any:
        """Call the engine, waiting at most `ANSWER_S`; the engine may still carry out a call that timed out."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._call(op, **fields)
        except TimeoutError:
            raise Unavailable(
                f"the engine did not answer {op!r} within {ANSWER_S:g} s", "it may be compiling; try again"
            ) from None

    def _future(self) -> asyncio.Future[Any]:
        if self._ended.done():
            raise death(self._process, self._cause)
        return asyncio.get_running_loop().create_future()

    def _send(self, message: Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame(message))


@contextlib.asynccontextmanager
async def open_engine(spec: EngineSpec, module: str = WORKER) -> AsyncIterator[SglangEngine]:
    """Start an engine whose process runs `module`; leaving the block ends the process.

    Raises ConfigError for a model that is not supported, or not over so many devices; EngineDied if its process ends or
    its device fails before it is up; VolleyError for another error of the engine.
    """
    check_split(ModelConfig.read(Path(spec.model_path)), spec.tp_size)
    with normalised(Path(spec.model_path), weights=spec.load_weights) as folder:
        spec = dataclasses.replace(spec, model_path=str(folder), tokenizer=spec.tokenizer or _tokenizer(spec))
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn(spec, theirs, module)
        _, engine = await asyncio.get_running_loop().create_connection(lambda: SglangEngine(process), sock=ours)
        try:
            await engine.start(spec)
            yield engine
        finally:
            await asyncio.shield(engine.close())


def _tokenizer(spec: EngineSpec) -> str:
    return str(Path(spec.model_path, "tokenizer.json").absolute())


def generate_message(name: str, request: GenerateRequest, *, streamed: bool) -> Message:
    """Build the message of a request that is called `name` inside the engine."""
    return {
        "op": "generate",
        "rid": name,
        "input_ids": request.input_ids,
        **dataclasses.asdict(request.sampling),
        "routed_from": request.routed_from,
        "top_logprobs": request.top_logprobs,
        "streamed": streamed,
    }


def _settle(future: asyncio.Future[Any] | None, message: Message, read: Callable[[Message], Any]) -> None:
    """End a call with the message's error, or with what `read` makes of it; nothing for one that has ended."""
    if future is None or future.done():
        return
    if "error" in message:
        future.set_exception(from_problem(message["error"]["status"], message["error"]))
    else:
        future.set_result(read(message))


def _result(message: Message) -> GenerateResult:
    spans: list[VersionSpan] = []
    for version, count in message["spans"]:
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version, start, start + count))
    return GenerateResult(
        rid=message["rid"],
        output_ids=message["output_ids"],
        logprobs=message["logprobs"],
        finish=FinishReason(**message["finish"]),
        versions=tuple(spans),
        prompt_tokens=message["prompt_tokens"],
        cached_tokens=message["cached_tokens"],
        routed_experts=from_wire(message["routed_experts"]) if "routed_experts" in message else None,
        top=_top(message, len(message["output_ids"])),
        waited_s=tuple(message.get("waited", ())),
    )


def _top(message: Message, n: int) -> TopTokens | None:
    if "top_ids" not in message:
        return None
    return TopTokens(message["top_ids"].reshape(n, -1), message["top_logprobs"].reshape(n, -1))
