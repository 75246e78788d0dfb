"""New weights into the engine. They take one way, `update`: the trainer's push says where to look now; a server that
has just started, or missed a push, finds the newest version on disk by itself.

Invariants: one update at a time; the engine loads the very bytes whose digests it has taken, and takes them once; a
version that fails leaves the serving one as it is; a server never goes back, except with a run that was begun anew;
staging or committing a version that is already staged or serving is a success without work, so a push and the watcher
may meet. What the engine computes with is judged by its own arrays, after every commit and every `AUDIT_S`: weights
that are not those that were loaded are as good as none, and no answer leaves: neither now nor, of requests that were
running, after others serve. What they computed is not read again: the commit after them empties the prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from services.rollout import metrics
from services.rollout.engines.base import CommitMode, CommitResult, Engine, Live
from services.rollout.weights.checkpoint import examine, parse
from services.rollout.weights.fence import VersionFence
from services.rollout.weights.serving import Distrusted, NothingServes, Serving, ServingState, StagedUpdate
from services.rollout.weights.turns import UpdateTurns
from shared.errors import (
    Conflict,
    Forbidden,
    OutOfMemory,
    Unavailable,
    VolleyError,
    WeightsError,
    WeightsUnpublished,
)
from shared.models.config import ModelConfig
from shared.process import telemetry
from shared.run import weights
from shared.types import WeightVersion

POLL_S = 1.0
RETRY_BAD_S = 30.0
AUDIT_S = 30.0
_log = telemetry.Log("weights")


@dataclass(frozen=True, slots=True)
class FailedVersion:
    """The newest version on disk could not be loaded; `at` is of the monotonic clock."""

    folder: Path
    at: float
    reason: str


@dataclass
class WeightUpdater:
    """Moves versions from disk into the engine.

    Args:
        root: the only folder weights are read from; None refuses every update.
        model: what the engine computes.
        run: the run whose weights are taken.
        dtype: the engine's.
        state: what the engine serves from the start.

    `staged` waits beside what serves; `_failed` is what the watcher does not try again at once.
    """

    engine: Engine
    root: Path | None
    model: ModelConfig
    run: str
    default_mode: CommitMode = "retract"
    dtype: str = "float32"
    state: ServingState = field(default_factory=NothingServes)
    staged: StagedUpdate | None = None
    _failed: FailedVersion | None = None
    _fence: VersionFence = field(default_factory=VersionFence)
    _turns: UpdateTurns = field(default_factory=UpdateTurns)

    @property
    def current(self) -> str | None:
        return self.state.version if isinstance(self.state, Serving) else None

    @property
    def digest(self) -> str | None:
        return self._serving.digest if self._serving else None

    @property
    def _serving(self) -> StagedUpdate | None:
        return self.state.update if isinstance(self.state, Serving) else None

    def why_not_ready(self) -> Unavailable | None:
        """None once weights serve; else what is missing."""
        match self.state:
            case Serving():
                return None
            case Distrusted(reason):
                return Unavailable(reason)
            case NothingServes() if self._failed is not None:
                return Unavailable(f"weights {self._failed.folder.name} cannot be loaded: {self._failed.reason}")
            case NothingServes():
                return WeightsUnpublished(f"no weights are published under {self.root} yet")

    async def stage(self, path: str) -> StagedUpdate:
        """Loads the checkpoint `path` (its manifest, its folder, or a Hugging Face folder).

        Raises Forbidden, WeightsError, Conflict, Unavailable or OutOfMemory; then nothing is staged.
        """
        async with self._turns.turn():
            return await self._stage(path)

    async def commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        """Raises Conflict if `version` is not staged, or `base_version` is not what serves; WeightsError if it then
        does not serve.
        """
        async with self._turns.turn():
            return await self._commit(version, base_version, mode)

    async def update(self, path: str, mode: CommitMode | None) -> tuple[StagedUpdate, CommitResult]:
        """`stage` and `commit`."""
        async with self._turns.turn():
            staged = await self._stage(path)
            return staged, await self._commit(staged.version, None, mode)

    async def watch(self) -> None:
        """Worker: loads the newest version of the root whenever it is newer than the serving one."""
        while self.root is not None:
            try:
                await self.catch_up()
            except VolleyError as error:
                _log.warning("update failed", detail=str(error), current=self.current)
            await asyncio.sleep(POLL_S)

    async def guard(self) -> None:
        """Worker: audits what serves."""
        while True:
            await asyncio.sleep(AUDIT_S)
            try:
                await self.audit()
            except Unavailable as error:
                _log.warning("audit put off", detail=str(error))

    async def audit(self) -> None:
        """Weights that are not those that were loaded no longer serve; the watcher loads them again. Raises
        Unavailable.
        """
        async with self._turns.between():
            if self._serving is not None:
                found = self._serving.judge(await self.engine.audit(), self.dtype)
                if found is not None:
                    self._distrust(self._serving.version, found)

    async def catch_up(self) -> None:
        """Loads the newest version if it is newer; one that failed is tried again after 30 s. Raises as `update`."""
        assert self.root is not None
        async with self._turns.between():
            newest = await asyncio.to_thread(weights.newest, self.root)
            if newest is not None and await asyncio.to_thread(self._fence.begun_anew, newest):
                _log.warning("the run was begun anew", newest=newest.name, current=self.current)
                self.state, self.staged = NothingServes(self.state.beginnings + 1), None
                self._fence, self._failed = VersionFence(), None
        if newest is None or not _newer(newest.name, self.state):
            return
        failed = self._failed
        if failed is not None and failed.folder == newest and failed.at > time.monotonic() - RETRY_BAD_S:
            return
        try:
            await self.update(str(newest), None)
        except (WeightsError, OutOfMemory, Conflict, Forbidden) as error:
            self._failed = FailedVersion(newest, time.monotonic(), str(error))
            raise
        self._failed = None

    async def _stage(self, path: str) -> StagedUpdate:
        if self.root is None:
            raise Forbidden("this server takes no weights", "start it with a run's configuration")
        start, where = time.perf_counter(), weights.confined(self.root, path)
        found = await asyncio.to_thread(examine, where, self.model, self.run)
        self._fence.check(found, await asyncio.to_thread(weights.newest, self.root), self._serving)
        for known in (self._serving, self.staged):
            if known is not None and (known.version, known.digest) == (found.version, found.digest):
                return known
        self.staged = None
        loaded = await self.engine.stage(found)
        again = await asyncio.to_thread(examine, where, self.model, self.run)
        if (again.version, again.digest) != (found.version, found.digest):
            raise WeightsError(f"{found.version} changed while it was loaded")
        self.staged = StagedUpdate(
            where,
            found.version,
            found.digest,
            loaded.checksum,
            loaded.timings,
            found.probe_logprobs,
            found.probe_noise,
            found.base.digest if found.base else None,
        )
        metrics.STAGE_SECONDS.observe(time.perf_counter() - start)
        _log.info("weights staged", version=found.version, **loaded.timings)
        return self.staged

    async def _commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        staged = self.staged
        if version == self.current and (staged is None or staged.version != version):
            live = Live(version, self._serving.checksum if self._serving else "")
            return CommitResult(version, version, 0, 0, 0.0, live)
        if staged is None or staged.version != version:
            waiting = staged.version if staged else "nothing"
            raise Conflict(
                f"{version} is not staged (staged: {waiting}, serving: {self.current})", "POST /weights/stage first"
            )
        if base_version is not None and base_version != self.current:
            raise Conflict(f"{version} builds on {base_version}, but {self.current} is serving")
        mode = mode or self.default_mode
        if self.current is None and mode == "in_place":
            mode = "retract"
        passed = version if parse(version) is not None else await asyncio.to_thread(self._newest_name)
        try:
            result = await self.engine.commit(version, mode)
        except asyncio.CancelledError:
            self._distrust(version, "its commit was not answered")
            raise
        wrong = staged.judge(result.live, self.dtype)  # no await before: not one answer passes in between
        if wrong is not None:
            self._distrust(version, wrong)
            raise WeightsError(
                f"{version} was committed, but {wrong}", "the server takes no requests until weights serve as loaded"
            )
        self.state, self.staged = Serving(version, staged, passed, self.state.beginnings), None
        self._fence.advance(staged)
        metrics.PAUSE_SECONDS.observe(result.pause_s)
        _log.info(
            "weights committed",
            version=version,
            previous=result.previous,
            continued=result.continued,
            pause_s=result.pause_s,
        )
        return result

    def _newest_name(self) -> str | None:
        """Weights that someone loaded by a name of their own stay until the run publishes something newer than it has
        now.
        """
        newest = None if self.root is None else weights.newest(self.root)
        return newest.name if newest else None

    def _distrust(self, version: str, reason: str) -> None:
        self.state = Distrusted(f"{version} does not serve as it was loaded: {reason}", self.state.beginnings + 1)
        self.staged = None
        metrics.DISTRUSTED.inc()
        _log.error("weights distrusted", version=version, reason=reason)


def _newer(candidate: str, state: ServingState) -> bool:
    """Whether a version of the run is newer than all that need not be loaded any more."""
    passed = parse(state.passed) if isinstance(state, Serving) and state.passed is not None else None
    return passed is None or WeightVersion.parse(candidate) > passed
