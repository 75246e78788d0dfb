"""`python -m tools.simulated.rollout`: the rollout service with an engine without a model, for fault injection.

Tokens and log-probabilities are a pure function of sampling seed and prompt, independent of batch, time, server and
weights. So a run with faults samples the same tokens as a run without. Weights are loaded, checked and swapped as in
the real engine, but not used to compute; each token carries the version that was serving when it was drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import numpy as np

from services.rollout.app import open_rollout
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
    SamplingParams,
    ScoredTokens,
    TopTokens,
)
from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from services.rollout.settings import from_config
from shared.boot import RunningService, main
from shared.errors import Conflict, NotReady, WeightsError
from shared.models.config import ModelConfig
from shared.published.chunks import reads
from shared.published.manifest import Chunk, WeightTree
from shared.run.checkpoint_files import copy_files
from shared.schema import RunConfig
from shared.sequences import spans

_TOKEN_S = 0.03
"""Long enough for episodes to be in flight during faults, short enough for runs of hundreds of steps."""
_FIRST_TEXT_ID = 10


@dataclass(slots=True)
class _RunningRequest:
    """A running request: tokens drawn so far, and their versions."""

    ids: list[int] = field(default_factory=list[int])
    versions: list[str] = field(default_factory=list[str])
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class _Weights:
    """Loaded arrays by leaf name, with their version and digest."""

    version: str
    digest: str
    arrays: dict[str, np.ndarray]

    @property
    def checksum(self) -> str:
        seen = blake3.blake3()
        for name, array in sorted(self.arrays.items()):
            seen.update(name.encode() + array.tobytes())
        return seen.hexdigest()


@dataclass
class SimulatedEngine:
    """See `engines.base.Engine`."""

    info: EngineInfo
    silent_s: float = 0.0
    serving: _Weights | None = None
    staged: _Weights | None = None
    paused: bool = False
    output_tokens: int = 0
    _running: dict[str, _RunningRequest] = field(default_factory=dict[str, _RunningRequest])
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Draw a token every `_TOKEN_S` seconds, each with the version serving then."""
        if self.serving is None:
            raise NotReady("no weights are committed yet", "retry when /ready answers 200")
        if request.rid in self._running:
            raise Conflict(f"a request {request.rid!r} is running", "give every request its own rid")
        ids, logprobs = draw(request.input_ids, request.sampling, self.info)
        running = self._running[request.rid] = _RunningRequest()
        try:
            while len(running.ids) < len(ids) and not running.aborted:
                await asyncio.sleep(_TOKEN_S)
                if not self.paused:
                    at = len(running.ids)
                    running.ids.append(int(ids[at]))
                    running.versions.append(self.serving.version)
                    self.output_tokens += 1
                    if on_tokens is not None:
                        new = ids[at : at + 1], logprobs[at : at + 1]
                        on_tokens(NewTokens(*new, self._top(*new, request.top_logprobs), self.serving.version))
        finally:
            del self._running[request.rid]
        return self._result(request, running, logprobs[: len(running.ids)])

    def _result(self, request: GenerateRequest, running: _RunningRequest, logprobs: np.ndarray) -> GenerateResult:
        ids, stops = running.ids, {*request.sampling.stop_token_ids, *self.info.eos_token_ids}
        if running.aborted:
            finish = FinishReason("abort", message="aborted")
        elif ids[-1] in stops:
            finish = FinishReason("stop", matched=ids[-1])
        else:
            finish = FinishReason("length", length=len(ids))
        return GenerateResult(
            rid=request.rid,
            output_ids=np.array(ids, np.int32),
            logprobs=logprobs,
            finish=finish,
            versions=spans(running.versions, range(len(ids))),
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            top=self._top(np.array(ids, np.int32), logprobs, request.top_logprobs),
        )

    def _top(self, ids: np.ndarray, logprobs: np.ndarray, k: int) -> TopTokens | None:
        """Return k tokens at each position: the drawn one and its successors, each less likely by 1 nat."""
        if not k:
            return None
        below = np.arange(k)
        successors = (ids[:, None] + below) % self.info.vocab_size
        return TopTokens(successors.astype(np.int32), (logprobs[:, None] - below).astype(np.float32))

    async def score(self, ids: np.ndarray, top_logprobs: int = 0) -> ScoredTokens:
        """Scores that depend on each token alone."""
        if self.serving is None:
            raise NotReady("no weights are committed yet", "retry when /ready answers 200")
        logprobs = -(ids[1:] % 7 + 1).astype(np.float32) / 4
        return ScoredTokens(self.serving.version, logprobs, self._top(ids[1:], logprobs, top_logprobs))

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        if arriving is not None:
            await arriving
        started = time.perf_counter()
        self.staged = _Weights(weights.version, weights.digest, await asyncio.to_thread(load, weights))
        return LoadedWeights(self.staged.checksum, {"restore_s": time.perf_counter() - started})

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        if self.staged is None or self.staged.version != version:
            raise Conflict(f"{version} is not staged")
        aborted = await self.abort(None) if mode == "abort" else 0
        previous, self.serving, self.staged = self.serving, self.staged, None
        old = previous.version if previous else None
        return CommitResult(version, old, len(self._running) - aborted, aborted, 0.0, await self.audit())

    async def audit(self) -> Live:
        return Live(None, "") if self.serving is None else Live(self.serving.version, self.serving.checksum)

    async def status(self) -> EngineStatus:
        now = self.serving
        return EngineStatus(
            current=now.version if now else None,
            staged=self.staged.version if self.staged else None,
            digest=now.digest if now else "",
            paused=self.paused,
            running=len(self._running),
            output_tokens=self.output_tokens,
        )

    async def abort(self, rid: str | None) -> int:
        doomed = [running for name, running in self._running.items() if rid in (None, name)]
        for running in doomed:
            running.aborted = True
        return len(doomed)

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def flush_cache(self) -> None:
        """Do nothing: there is no cache."""

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()


def load(weights: StagedWeights) -> dict[str, np.ndarray]:
    """Load the arrays of chunks, or of a folder of `.npy` files, by leaf name.

    Raises WeightsError if they do not match the manifest, and Unavailable if they cannot be read now.
    """
    if weights.kind == "chunks":
        tree = WeightTree(weights.tree, tuple(Chunk(file.blake3, file.size) for file in weights.files))
        return {name: read() for name, read in reads(Path(weights.folder), tree, weights.version).items()}
    copies = defaultdict[str, io.BytesIO](io.BytesIO)
    copy_files(Path(weights.folder), weights.below, weights.files, weights.version, lambda name: copies[name])
    arrays: dict[str, np.ndarray] = {}
    for name, file in copies.items():
        file.seek(0)
        try:
            arrays[Path(name).stem] = np.load(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise WeightsError(f"{weights.version}: {name} cannot be read: {error}") from error
    if {leaf.key: (leaf.shape, leaf.dtype) for leaf in weights.tree} != {
        k: (v.shape, str(v.dtype)) for k, v in arrays.items()
    }:
        raise WeightsError(f"{weights.version} holds other leaves than its manifest names")
    return arrays


def draw(prompt: np.ndarray, sampling: SamplingParams, info: EngineInfo) -> tuple[np.ndarray, np.ndarray]:
    """Draw int32[n] token ids with their float32[n] log-probabilities; they end with a stop token or at the limit."""
    seed = sampling.sampling_seed if sampling.sampling_seed is not None and sampling.temperature else 0
    rng = np.random.default_rng([seed, *prompt.tolist()])
    n = min(sampling.max_new_tokens, int(rng.integers(2, 8)))
    ids = rng.integers(_FIRST_TEXT_ID, info.vocab_size, n).astype(np.int32)
    stops = sampling.stop_token_ids or info.eos_token_ids
    if n < sampling.max_new_tokens and stops:
        ids[-1] = stops[0]
    return ids, -rng.exponential(1.0, n).astype(np.float32)


@asynccontextmanager
async def open_engine(spec: EngineSpec) -> AsyncIterator[SimulatedEngine]:
    """Open an engine with the sizes of `spec`; it serves no version before its first commit."""
    model = ModelConfig.read(Path(spec.model_path))
    tokens = spec.max_total_tokens or spec.context_length * spec.max_running_requests
    info = EngineInfo(
        model.vocab_size, spec.context_length, tokens, spec.max_running_requests, model.eos_token_ids, 0.0, os.getpid()
    )
    async with contextlib.AsyncExitStack() as stack:
        engine = SimulatedEngine(info)
        stack.push_async_callback(engine.close)
        yield engine


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    async with open_rollout(from_config(config), open_engine) as service:
        yield service


if __name__ == "__main__":
    main("rollout", open_service=open_service)
