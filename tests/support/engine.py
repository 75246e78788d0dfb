"""An engine without a model, and the rollout service around it: the wire is the service's own.

Every token is the last one plus one, unless `draw` says otherwise.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from services.rollout.api.generate import read_tokens
from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
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
from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from services.rollout.settings import RolloutSettings
from services.rollout.weights.failures import FailedVersion
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Conflict, VolleyError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import copy_files
from shared.services_schema import Limits, TokenFiles
from shared.types import VersionSpan
from tests.support.tokenizer import FOLDER

SETTINGS = RolloutSettings(
    EngineSpec(str(FOLDER)), None, "retract", "test", "s", "http://x", None, None, TokenFiles(), None, Limits()
)


@dataclass
class FakeEngine:
    """Args:
    draw: the answer to a request.
    delay_s: how long an answer takes.
    hold: while set, requests wait.
    tokens: what each token of a stream waits for.
    refuses: errors of loading a version, in turn.
    stubborn: acknowledges commits, labels tokens as told, and keeps computing with the arrays it has.
    on_stage: called before files are read, which waits for `stages`.
    on_read: called when all have been read.
    n_read: bytes read of each file.
    commits: what the answer to a commit waits for, after the swap.
    n_sampled: tokens sampled for all requests, also those that an answer leaves out.
    """

    version: str | None = None
    draw: Callable[[GenerateRequest], np.ndarray] = lambda request: counted(request)
    delay_s: float = 0.0
    hold: bool = False
    tokens: asyncio.Semaphore | None = None
    refuses: Mapping[str, Iterator[VolleyError]] = field(default_factory=dict[str, Iterator[VolleyError]])
    stubborn: bool = False
    on_stage: Callable[[], None] = lambda: None
    on_read: Callable[[], None] = lambda: None
    n_read: Counter[str] = field(default_factory=Counter[str])
    stages: asyncio.Event | None = None
    commits: asyncio.Event | None = None
    silent_s: float = 0.0
    logprobs: np.ndarray = field(default_factory=lambda: np.array([-0.5, -1.5], np.float32))
    staged: str = ""
    arrays: str = "none"
    staging: list[str] = field(default_factory=list[str])
    loaded: list[str] = field(default_factory=list[str])
    modes: list[str] = field(default_factory=list[str])
    n_requests: int = 0
    n_sampled: int = 0
    waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    info: EngineInfo = field(default_factory=lambda: EngineInfo(512, 256, 4096, 16, (2,), 0.0, 1))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Answer after `delay_s`; the tokens arrive one by one, at even intervals."""
        self.n_requests += 1
        ids = self.draw(request)[: request.sampling.max_new_tokens]
        n, finish = len(ids), FinishReason("length", length=len(ids))
        if ids[-1] in self.info.eos_token_ids:
            finish = FinishReason("stop", matched=int(ids[-1]))
        if request.rid in self.waiting:
            raise Conflict(f"a request {request.rid!r} is running")
        event = self.waiting[request.rid] = asyncio.Event()
        try:
            n = await self._sample(request, ids, on_tokens, event)
            self.n_sampled += n
            if self.hold:
                await event.wait()
                n = 1
            if event.is_set():
                finish = FinishReason("abort", message="aborted")
        finally:
            del self.waiting[request.rid]
        spans, logprobs = (VersionSpan(self.version or "", 0, n),), np.full(n, -0.5, np.float32)
        top = most_likely(ids[:n], logprobs, request.top_logprobs)
        return GenerateResult(request.rid, ids[:n], logprobs, finish, spans, len(request.input_ids), 0, top=top)

    async def _sample(
        self, request: GenerateRequest, ids: np.ndarray, on_tokens: OnTokens | None, ended: asyncio.Event
    ) -> int:
        """Return the number of tokens that were sampled until the request was ended."""
        if on_tokens is None:
            await asyncio.sleep(self.delay_s)
            return len(ids)
        for i in range(len(ids)):
            await asyncio.sleep(self.delay_s / len(ids))
            if self.tokens is not None:
                await self.tokens.acquire()
            if ended.is_set():
                return i
            new, logprob = ids[i : i + 1], np.full(1, -0.5, np.float32)
            on_tokens(NewTokens(new, logprob, most_likely(new, logprob, request.top_logprobs), self.version or ""))
            if self.hold:
                return 1
        return len(ids)

    async def score(self, ids: np.ndarray, top_logprobs: int = 0) -> ScoredTokens:
        """-0.25, -0.5, … in the order of the tokens."""
        logprobs = -0.25 * np.arange(1, len(ids), dtype=np.float32)
        return ScoredTokens(self.version or "", logprobs, most_likely(ids[1:], logprobs, top_logprobs))

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        if arriving is not None:
            await arriving
        self.staging.append(weights.version)
        self.on_stage()
        if self.stages is not None:
            await self.stages.wait()
        if weights.kind == "orbax":
            copies = defaultdict[str, io.BytesIO](io.BytesIO)
            copy_files(Path(weights.folder), weights.below, weights.files, weights.version, lambda name: copies[name])
            self.n_read.update({name: len(copy.getvalue()) for name, copy in copies.items()})
        self.on_read()
        if weights.version in self.refuses:
            raise next(self.refuses[weights.version])
        self.loaded.append(weights.version)
        self.staged = f"arrays of {weights.digest}"
        return LoadedWeights(self.staged, {"restore_s": 0.0})

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        self.modes.append(mode)
        previous, self.version = self.version, version
        if not self.stubborn:
            self.arrays = self.staged
        if self.commits is not None:
            await self.commits.wait()
        return CommitResult(version, previous, 0, 0, 0.001, await self.audit())

    async def audit(self) -> Live:
        return Live(self.version, self.arrays, self.logprobs)

    async def status(self) -> EngineStatus:
        return EngineStatus(current=self.version, running=len(self.waiting))

    async def abort(self, rid: str | None) -> int:
        doomed = [event for name, event in self.waiting.items() if rid in (None, name)]
        for event in doomed:
            event.set()
        return len(doomed)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class RolloutDouble:
    """The rollout service in the test's process.

    Args:
        delay_s: how long an answer takes.
        answer: the ids of every answer, instead of some that follow from the sampling seed.
    """

    def __init__(self, *, delay_s: float = 0.0, answer: list[int] | None = None) -> None:
        self.answer = answer
        info = EngineInfo(512, 512, 2**20, 64, (2,), 0.0, 1)
        self.engine = FakeEngine(draw=self._draw, delay_s=delay_s, info=info)
        self._updates = WeightUpdater(self.engine, None, ModelConfig.read(FOLDER), "test")
        self.serve("e000001-s000000")

    def serve(self, version: str) -> None:
        """As if these weights had been loaded, once no other version is held."""
        if self._updates.is_held(version):
            self._late = asyncio.ensure_future(self._serve_late(version))
        else:
            self.engine.version, self._updates.state = version, Serving(version)

    async def _serve_late(self, version: str) -> None:
        while self._updates.is_held(version):
            await asyncio.sleep(0.01)
        if self._updates.current is None or version > self._updates.current:
            self.serve(version)

    def refuse(self, version: FailedVersion) -> None:
        """As if the version had failed to load."""
        self._updates._failures.last = version

    def silence(self, seconds: float) -> None:
        """The service answers, and takes no requests while its engine has been silent for so long."""
        self.engine.silent_s = seconds

    def app(self) -> FastAPI:
        settings = replace(SETTINGS, engine=replace(SETTINGS.engine, context_length=512))
        return build_app(settings, self.engine, self._updates, GenerationRunner(self.engine, 0.2, self._updates), None)

    def _draw(self, request: GenerateRequest) -> np.ndarray:
        rng = np.random.default_rng(request.sampling.sampling_seed)
        drawn = [*rng.integers(10, 200, rng.integers(1, 8)).tolist(), *self.engine.info.eos_token_ids]
        return np.array(self.answer or drawn, np.int32)


def most_likely(ids: np.ndarray, logprobs: np.ndarray, k: int) -> TopTokens | None:
    """k tokens at each position: the sampled one and its successors, each less likely by 1 nat."""
    if not k:
        return None
    below = np.arange(k)
    return TopTokens(((ids[:, None] + below) % 512).astype(np.int32), (logprobs[:, None] - below).astype(np.float32))


def counted(request: GenerateRequest) -> np.ndarray:
    return (int(request.input_ids[-1]) + 1 + np.arange(request.sampling.max_new_tokens, dtype=np.int32)) % 512


def generate_request(body: dict[str, Any], info: EngineInfo) -> GenerateRequest:
    """Read the body of a request that samples. Raises InputError."""
    request = read_tokens(body, info).request
    assert request is not None
    return request
