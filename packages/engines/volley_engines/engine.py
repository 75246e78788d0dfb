"""Engine in front of an inference server of another project, reached over HTTP.

Invariants: an answer leaves only if each of its tokens was sampled by weights that this process told the server to
load, and the server still names; while weights change, answers wait until the commit has been judged. A load that
fails is followed by a load of the weights before, because servers leave mixed weights behind. If that fails too, or if
the server comes back with other weights, nothing is answered until the next commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.base import (
    Arriving,
    EngineInfo,
    EngineStatus,
    GenerateRequest,
    GenerateResult,
    OnTokens,
    ScoredTokens,
)
from services.rollout.engines.probe import check_probe
from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from shared.errors import Conflict, EngineDied, NotReady, ServiceUnreachable, Unavailable, VolleyError, WeightsError
from shared.models.weight_files import UNMERGED
from shared.process.telemetry import Log
from shared.types import VersionSpan
from volley_engines.receiver import Receiver
from volley_engines.wire import ForeignServer, ServerAnswer

PERIOD_S = 2.0
"""Time between two questions for the server's health and version."""
_log = Log("engine")


@dataclass(frozen=True, slots=True, eq=False)
class _LoadedFolder:
    """Weights in a folder of this process, or of the caller (`is_ours` false), with the probe of StagedWeights."""

    folder: Path
    version: str
    digest: str
    names: frozenset[str]
    probe_ids: np.ndarray | None = None
    probe_logprobs: np.ndarray | None = None
    probe_noise: np.ndarray | None = None
    is_ours: bool = True

    def check(self, live: Live) -> None:
        """Raises WeightsError if a server that was to load these weights serves others."""
        if live.version != self.version:
            raise WeightsError(f"the server names {live.version} after a load of {self.version}")
        if live.logprobs is not None and self.probe_logprobs is not None:
            check_probe(live.logprobs, self.probe_logprobs, self.probe_noise, "bfloat16")


class HttpEngine:
    """Implements `engines.base.Engine`; `opening.open_engine` makes it.

    Args:
        folder: for weights, on a path that the server reads under the same name.
    """

    def __init__(self, server: ForeignServer, info: EngineInfo, model_path: Path, folder: Path, url: str) -> None:
        self._server, self._info, self._model_path, self._folder, self._url = server, info, model_path, folder, url
        self._names = dict[str, str]()
        self._staged: _LoadedFolder | None = None
        self._serving: _LoadedFolder | None = None
        self._known = set[str]()
        self._lost: str | None = None
        self._n_commits = 0
        self._steady, self._closed = asyncio.Event(), asyncio.Event()
        self._steady.set()
        self._seen, self._paused, self._n_tokens = time.monotonic(), False, 0
        self._is_asked, self._answers = False, True
        self._bases: Any = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def silent_s(self) -> float:
        if self._is_asked or not self._steady.is_set():  # a busy server answers late; both waits have their limits
            return 0.0
        silent = time.monotonic() - self._seen
        return silent if silent > 2 * PERIOD_S else 0.0

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        await self._check_serving()
        if request.rid in self._names:
            raise Conflict(f"a request {request.rid!r} is running", "give every request its own rid")
        name = self._names[request.rid] = f"volley-{uuid.uuid4().hex}"
        begun = self._n_commits
        receiver = None if on_tokens is None else Receiver(on_tokens, self._version_to_answer, self._check_ids)
        try:
            sampled = await self._server.generate(name, request, receiver)
        except ServiceUnreachable as error:
            raise EngineDied(f"the server's answer was lost: {error.detail}", "is it running?") from error
        except asyncio.CancelledError:
            await self._forget(name)
            raise
        finally:
            del self._names[request.rid]
        result = await self._checked(request, sampled, begun)
        if receiver is not None:
            receiver.finish()
        self._n_tokens += len(result.output_ids)
        self._seen = time.monotonic()
        return result

    async def score(self, ids: np.ndarray, top_logprobs: int = 0) -> ScoredTokens:
        await self._check_serving()
        try:
            scored = await self._server.score(ids, top_logprobs)
        except ServiceUnreachable as error:
            raise EngineDied(f"the server's answer was lost: {error.detail}", "is it running?") from error
        await self._check_versions({scored.version})
        return scored

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        self._drop_staged()
        if weights.kind == "hf":
            folder = Path(weights.folder)
            _check_merged(folder)
            self._staged = _LoadedFolder(folder, weights.version, weights.digest, frozenset(), is_ours=False)
            return LoadedWeights("", {})
        folder = self._folder / f"{weights.version}-{uuid.uuid4().hex[:8]}"
        wanted = True

        def still() -> None:
            if not wanted:
                raise Conflict(f"{weights.version} is not wanted any more")

        from volley_engines import model_folder
        from volley_engines.merging import BaseCache  # it needs the environment `rollout`

        self._bases = self._bases or BaseCache()
        arrival = Arrival(still, is_complete=arriving is None)
        write = partial(model_folder.write, weights, self._model_path, folder, arrival, self._bases)
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            if arriving is not None:
                await asyncio.wait({writing, arriving}, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done():
                    arriving.result()
                    arrival.complete()
            names, timings = await asyncio.shield(writing)
            if arriving is not None:
                await arriving
        except BaseException:
            wanted = False
            arrival.complete()
            writing.add_done_callback(lambda done: done.cancelled() or (done.exception(), remove(folder)))
            raise
        try:
            self._check_names(names, weights.version)
        except WeightsError:
            await asyncio.to_thread(remove, folder)
            raise
        probe = weights.probe_ids, weights.probe_logprobs, weights.probe_noise
        self._staged = _LoadedFolder(folder, weights.version, weights.digest, names, *probe)
        return LoadedWeights("", timings)

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        staged, before = self._staged, self._serving
        if staged is None or staged.version != version:
            raise Conflict(f"{version} is not staged (staged: {staged.version if staged else 'nothing'})")
        begun, running, was_paused = time.perf_counter(), len(self._names), self._paused
        self._steady.clear()
        self._n_commits += 1
        try:
            await self._pause_for(mode)
            try:
                live = await self._load(staged, mode)
            except BaseException as error:
                await self._return_to(before, error)
                raise
            if was_paused:
                await self.pause()
        finally:
            self._seen = time.monotonic()
            self._steady.set()
        self._staged, self._serving = None, staged
        await asyncio.to_thread(self._remove_all_but, staged.folder)
        counts = (0, running) if mode == "abort" else (running, 0)
        return CommitResult(version, before.version if before else None, *counts, time.perf_counter() - begun, live)

    async def audit(self) -> Live:
        """Report the version that the server names. Raises Unavailable."""
        if self._lost is not None:
            return Live(f"unknown weights ({self._lost})", "")
        if not self._steady.is_set():
            raise Unavailable("weights are being loaded")
        return Live(await self._server.version(), "")

    async def status(self) -> EngineStatus:
        current, staged = self._serving, self._staged
        return EngineStatus(
            current=current.version if current else None,
            staged=staged.version if staged else None,
            digest=current.digest if current else "",
            paused=self._paused,
            running=len(self._names),
            output_tokens=self._n_tokens,
        )

    async def abort(self, rid: str | None) -> int:
        names = [*self._names.values()] if rid is None else [self._names[rid]] if rid in self._names else []
        if names:
            await self._server.abort(names)
        return len(names)

    async def pause(self) -> None:
        await self._server.pause("in_place")
        self._paused = True

    async def resume(self) -> None:
        await self._server.resume()
        self._paused = False

    async def flush_cache(self) -> None:
        await self._server.flush_cache()
        if self._paused:
            await self.pause()

    async def wait_closed(self) -> None:
        """Ask the server for its health and version every `PERIOD_S`, until the engine is closed."""
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._closed.wait()
                    return
            await self._look()

    async def close(self) -> None:
        self._closed.set()

    async def _look(self) -> None:
        await self._steady.wait()
        begun = self._n_commits
        try:
            named = await self._server.version()
            if begun == self._n_commits and self._serving is not None and named != self._serving.version:
                self._lose(f"the server names {named}")
            self._is_asked = not self._paused  # a paused server may answer that it is not healthy
            if self._is_asked:
                await self._server.check_health()
        except VolleyError as error:
            if self._answers:
                _log.warning("the engine's server does not answer", url=self._url, detail=str(error))
            self._answers = False
            return
        finally:
            self._is_asked = False
        if not self._answers:
            _log.info("the engine's server answers again", url=self._url, version=named)
        self._seen, self._answers = time.monotonic(), True

    # --- weights ----------------------------------------------------------------------------------------------------

    async def _load(self, staged: _LoadedFolder, mode: CommitMode) -> Live:
        """Make the paused server load weights, resume it, and score the probe. Raises WeightsError, Unavailable."""
        await self._server.load(str(staged.folder), staged.version, mode)
        await self.resume()
        named = await self._server.version()
        self._lost, scored = None, None
        self._known.add(staged.version)
        if staged.probe_ids is not None and named == staged.version:
            scored = await self._server.score(staged.probe_ids[: self._info.context_length - 1], 0)
            named = scored.version
        return Live(named, "", None if scored is None else scored.logprobs)

    async def _pause_for(self, mode: CommitMode) -> None:
        """Stop decoding before weights change; if that fails, let it go on."""
        try:
            await self._server.pause(mode)
        except VolleyError:
            with contextlib.suppress(VolleyError):
                await self._server.resume()
            raise

    async def _return_to(self, before: _LoadedFolder | None, error: BaseException) -> None:
        """Load the weights before again after a failed load; if that fails, nothing serves."""
        self._lose(f"a load failed: {error}")
        if isinstance(error, asyncio.CancelledError):
            return
        try:
            if before is None:
                await self.resume()
                return
            before.check(await self._load(before, "retract"))
        except VolleyError as second:
            self._lose(f"a load failed: {error}; then the server failed to go back: {second}")
            with contextlib.suppress(VolleyError):
                await self.resume()
            return
        self._serving = before
        _log.warning("a load failed; the weights before were loaded again", version=before.version, detail=str(error))

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            _log.error("the engine's server has unknown weights", url=self._url, detail=reason)
        self._lost, self._serving = reason, None
        self._known.clear()

    def _check_names(self, names: frozenset[str], version: str) -> None:
        """Raises WeightsError for other tensors than the serving ones: servers ignore missing ones silently."""
        serving = self._serving
        if serving is not None and serving.names and names != serving.names:
            other = sorted(names ^ serving.names)[0]
            raise WeightsError(f"{version} has other tensors than {serving.version}, e.g. {other}")

    def _remove_all_but(self, serving: Path) -> None:
        """Remove the other versions' folders: those before, and those that a server lost."""
        for folder in self._folder.glob("*"):
            if folder != serving:
                remove(folder)

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and staged.is_ours:
            remove(staged.folder)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _version_to_answer(self) -> str | None:
        """Return the version of tokens that may leave now; None while weights change or are unknown."""
        return self._serving.version if self._steady.is_set() and self._serving is not None else None

    async def _check_serving(self) -> None:
        await self._steady.wait()
        if self._lost is not None:
            raise NotReady(f"the server has unknown weights: {self._lost}")
        if self._serving is None:
            raise NotReady("no weights are committed yet", "retry when /ready answers 200")

    async def _checked(self, request: GenerateRequest, sampled: ServerAnswer, begun: int) -> GenerateResult:
        await self._steady.wait()
        spans = sampled.spans
        n = len(sampled.ids)
        if spans is None:
            if begun != self._n_commits or self._serving is None:
                raise NotReady("weights changed meanwhile, and the server does not name the version of each token")
            spans = (VersionSpan(sampled.version or self._serving.version, 0, n),) if n else ()
        await self._check_versions({span.version for span in spans})
        if n > request.sampling.max_new_tokens:
            raise Unavailable(f"the server answered {n} tokens, {request.sampling.max_new_tokens} were asked for")
        self._check_ids(sampled.ids)
        return GenerateResult(
            rid=request.rid,
            output_ids=sampled.ids,
            logprobs=sampled.logprobs,
            finish=sampled.finish,
            versions=spans,
            prompt_tokens=len(request.input_ids),
            cached_tokens=sampled.cached_tokens,
            top=sampled.top,
        )

    def _check_ids(self, ids: np.ndarray) -> None:
        if (ids >= self._info.vocab_size).any():
            raise Unavailable(f"the server sampled token {ids.max()}, outside the {self._info.vocab_size} of the model")

    async def _check_versions(self, versions: set[str]) -> None:
        await self._steady.wait()
        if other := sorted(versions - self._known):
            self._lose(f"the server answered with the weights {other[0]}")
            raise NotReady(f"the server answered with the weights {other[0]}, which it was not told to load")

    async def _forget(self, name: str) -> None:
        """Abort a request whose answer nobody waits for; closing the connection may not reach the server at once."""
        with contextlib.suppress(VolleyError):
            await asyncio.shield(self._server.abort([name]))


def _check_merged(folder: Path) -> None:
    if (folder / UNMERGED).exists():
        raise WeightsError(
            f"{folder} holds {UNMERGED}, which this engine's server does not read", "use rollout.engine.kind=sglang_jax"
        )


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
