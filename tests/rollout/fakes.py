"""An engine without a model: every token is the last one plus one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.rollout.engines.base import (
    CommitMode,
    CommitResult,
    EngineInfo,
    EngineSpec,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Live,
    LoadedWeights,
    StagedWeights,
)
from services.rollout.settings import RolloutSettings
from shared.errors import Conflict, WeightsError
from shared.run.weights import read_files
from shared.schema import Limits, TokenFiles
from shared.types import VersionSpan
from tests.support.tokenizer import FOLDER

SETTINGS = RolloutSettings(
    EngineSpec(str(FOLDER)), None, "retract", "test", "s", "http://x", None, None, TokenFiles(), None, Limits()
)


@dataclass
class FakeEngine:
    """Args:
    hold: while set, requests wait.
    broken: versions that fail to load.
    stubborn: acknowledges commits, labels tokens as told, and keeps computing with the arrays it has.
    on_stage: called before files are read, which waits for `stages`.
    on_read: called when all have been read.
    n_read: bytes read of each file.
    commits: what the answer to a commit waits for, after the swap.
    """

    version: str | None = None
    hold: bool = False
    broken: set[str] = field(default_factory=set[str])
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
    waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    info: EngineInfo = field(default_factory=lambda: EngineInfo(512, 256, 4096, 16, (2,), 0.0, 1))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        n, finish = request.sampling.max_new_tokens, FinishReason("length", length=request.sampling.max_new_tokens)
        if request.rid in self.waiting:
            raise Conflict(f"a request {request.rid!r} is running")
        event = self.waiting[request.rid] = asyncio.Event()
        try:
            if self.hold:
                await event.wait()
                n, finish = 1, FinishReason("abort", message="aborted")
        finally:
            del self.waiting[request.rid]
        ids = (int(request.input_ids[-1]) + 1 + np.arange(n, dtype=np.int32)) % 512
        spans = (VersionSpan(self.version or "", 0, n),)
        return GenerateResult(request.rid, ids, np.full(n, -0.5, np.float32), finish, spans, len(request.input_ids), 0)

    async def stage(self, weights: StagedWeights) -> LoadedWeights:
        self.staging.append(weights.version)
        self.on_stage()
        if self.stages is not None:
            await self.stages.wait()
        if weights.kind == "orbax":
            for name, data in read_files(Path(weights.folder), weights.below, weights.files, weights.version):
                self.n_read[name] += len(data)
        self.on_read()
        if weights.version in self.broken:
            raise WeightsError(f"{weights.version} is broken")
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
