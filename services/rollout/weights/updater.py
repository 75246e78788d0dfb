"""New weights into the engine: pushed by the trainer, or found on disk by a server that is late or missed a push.

Invariants: one update at a time; files are verified against their manifest before they are loaded and again after; a
version that fails leaves the serving one as it is; a server never goes back, except with a run that was begun anew;
staging or committing a version that is already staged or serving is a success without work, so a push and the watcher
may meet. What the engine computes with is judged by its own arrays, after every commit and every `AUDIT_S`: weights
that are not those that were loaded are as good as none, and no answer leaves: neither now nor, of requests that were
running, after others serve. What they computed is not read again: the commit after them empties the prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.rollout import metrics
from services.rollout.engines.base import CommitMode, CommitResult, Engine, Live, StagedWeights
from services.rollout.weights.checkpoint import examine, parse
from services.rollout.weights.probe import check_probe
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
STAGE_S = 600.0
WAIT_S = 300.0
MAX_WAITING = 8
_log = telemetry.Log("weights")


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Weights that were loaded from `path`: how to know them again, and `timings`, durations in seconds."""

    path: Path
    version: str
    digest: str
    checksum: str
    timings: Mapping[str, float]
    probe_logprobs: np.ndarray | None = None
    probe_noise: float | None = None

    def judge(self, live: Live, dtype: str) -> str | None:
        """What speaks against `live` being these weights."""
        if live.version != self.version:
            return f"the engine says that it serves {live.version}"
        if live.checksum != self.checksum:
            return f"the engine computes with other arrays: checksum {live.checksum}, {self.checksum} was loaded"
        if self.probe_logprobs is not None and live.logprobs is not None:
            try:
                check_probe(live.logprobs, self.probe_logprobs, self.probe_noise, dtype)
            except WeightsError as error:
                return str(error)
        return None


@dataclass
class WeightUpdater:
    """Moves versions from disk into the engine.

    Args:
        root: the only folder weights are read from; None refuses every update.
        model: what the engine computes.
        run: the run whose weights are taken.
        current: the version the engine serves from the start, if any.
        dtype: the engine's.

    `beginnings` counts how often what served was found not to be the run's: no answer may span two of them. `_passed`
    is the newest version of the run that the watcher need not look at, `_floor` the newest that ever served and
    `_last_path` where it lay, `_wrong` why what serves cannot be trusted.
    """

    engine: Engine
    root: Path | None
    model: ModelConfig
    run: str
    default_mode: CommitMode = "retract"
    current: str | None = None
    dtype: str = "float32"
    staged: StagedUpdate | None = None
    beginnings: int = 0
    _serving: StagedUpdate | None = None
    _wrong: str | None = None
    _passed: str | None = None
    _floor: WeightVersion | None = None
    _last_path: Path | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _n_waiting: int = 0
    _bad: dict[Path, tuple[float, str]] = field(default_factory=dict[Path, tuple[float, str]])

    @property
    def digest(self) -> str | None:
        return self._serving.digest if self._serving else None

    def why_not_ready(self) -> Unavailable | None:
        """None once weights serve; else what is missing."""
        if self.current is not None:
            return None
        if self._wrong is not None:
            return Unavailable(self._wrong)
        if self._bad:
            path, (_, reason) = next(reversed(self._bad.items()))
            return Unavailable(f"weights {path.name} cannot be loaded: {reason}")
        return WeightsUnpublished(f"no weights are published under {self.root} yet")

    async def stage(self, path: str) -> StagedUpdate:
        """Loads the checkpoint `path` (its manifest, its folder, or a Hugging Face folder).

        Raises Forbidden, WeightsError, Conflict, Unavailable or OutOfMemory; then nothing is staged.
        """
        async with self._turn():
            return await self._stage(self._confined(path))

    async def commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        """Raises Conflict if `version` is not staged, or `base_version` is not what serves; WeightsError if it then
        does not serve.
        """
        async with self._turn():
            return await self._commit(version, base_version, mode)

    async def update(self, path: str, mode: CommitMode | None) -> tuple[StagedUpdate, CommitResult]:
        """`stage` and `commit`."""
        async with self._turn():
            staged = await self._stage(self._confined(path))
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
        async with self._lock:
            if self._serving is not None and self.current is not None:
                found = self._serving.judge(await self.engine.audit(), self.dtype)
                if found is not None:
                    self._distrust(self.current, found)

    async def catch_up(self) -> None:
        """Loads the newest version if it is newer; one that failed is tried again after 30 s. Raises as `stage`."""
        assert self.root is not None
        async with self._lock:
            newest = await asyncio.to_thread(weights.newest, self.root)
            if newest is not None and await asyncio.to_thread(self._begun_anew, newest):
                _log.warning("the run was begun anew", newest=newest.name, current=self.current)
                self._begin()
                self._floor = self._last_path = self._wrong = None
                self._bad.clear()
        if newest is None or not _newer(newest.name, self._passed):
            return
        if self._bad.get(newest, (-RETRY_BAD_S, ""))[0] > time.monotonic() - RETRY_BAD_S:
            return
        try:
            await self.update(str(newest), None)
        except (WeightsError, OutOfMemory, Conflict, Forbidden) as error:
            self._bad.pop(newest, None)
            self._bad[newest] = (time.monotonic(), str(error))
            raise
        self._bad.clear()

    def _begun_anew(self, newest: Path) -> bool:
        """A run always keeps its newest version, if only set aside as damaged: where that is older than ours, and ours
        is gone, the folder was emptied.
        """
        if (
            self.root is None
            or self._floor is None
            or self._last_path is None
            or WeightVersion.parse(newest.name) >= self._floor
        ):
            return False
        return not self._last_path.exists() and not (self.root / weights.BAD / str(self._floor)).exists()

    def _now_passed(self) -> str | None:
        """Weights that someone loaded by a name of their own stay until the run publishes something newer than it has
        now.
        """
        assert self.root is not None
        newest = weights.newest(self.root)
        named_by_run = self.current is not None and parse(self.current) is not None
        return self.current if named_by_run or newest is None else newest.name

    def _confined(self, path: str) -> Path:
        if self.root is None:
            raise Forbidden("this server takes no weights", "start it with a run's configuration")
        return weights.confined(self.root, path)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._n_waiting >= MAX_WAITING:
            raise Unavailable(f"{self._n_waiting} weight updates wait already")
        self._n_waiting += 1
        try:
            async with _within(WAIT_S, "the weight update did not get its turn"):
                await self._lock.acquire()
            try:
                async with _within(STAGE_S, "the weight update did not end"):
                    yield
            finally:
                self._lock.release()
        finally:
            self._n_waiting -= 1

    async def _stage(self, path: Path) -> StagedUpdate:
        start = time.perf_counter()
        found = await asyncio.to_thread(examine, path, self.model, self.run)
        await asyncio.to_thread(self._fence, found)
        for known in (self._serving, self.staged):
            if known is not None and (known.version, known.digest) == (found.version, found.digest):
                return known
        verify_s = time.perf_counter() - start
        self.staged = None
        loaded = await self.engine.stage(found)
        start_again = time.perf_counter()
        again = await asyncio.to_thread(examine, path, self.model, self.run)
        if (again.version, again.digest) != (found.version, found.digest):
            raise WeightsError(f"{found.version} changed while it was loaded")
        timings = {"verify_s": verify_s + time.perf_counter() - start_again, **loaded.timings}
        self.staged = StagedUpdate(
            path, found.version, found.digest, loaded.checksum, timings, found.probe_logprobs, found.probe_noise
        )
        metrics.STAGE_SECONDS.observe(time.perf_counter() - start)
        _log.info("weights staged", version=found.version, **timings)
        return self.staged

    def _fence(self, found: StagedWeights) -> None:
        """Raises Conflict for weights that the run has left behind: an older trainer may still be sending them."""
        version = parse(found.version)
        if version is None:
            return
        assert self.root is not None
        newest = weights.newest(self.root)
        if newest is not None and WeightVersion.parse(newest.name).epoch > version.epoch:
            raise Conflict(f"{found.version} is of an earlier epoch than {newest.name}, the run's newest")
        if self._floor is not None and version < self._floor:
            raise Conflict(
                f"{found.version} is older than {self._floor}, which has served", "a server of a run only moves forward"
            )
        if self._serving is not None and found.version == self.current and found.digest != self.digest:
            raise Conflict(f"{found.version} serves already, with another digest", "a version is published once")

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
        self.current, self._serving, self.staged, self._wrong = version, staged, None, None
        if (known := parse(version)) is not None:
            self._floor, self._last_path = known, staged.path
        self._passed = await asyncio.to_thread(self._now_passed)
        metrics.PAUSE_SECONDS.observe(result.pause_s)
        _log.info(
            "weights committed",
            version=version,
            previous=result.previous,
            continued=result.continued,
            pause_s=result.pause_s,
        )
        return result

    def _begin(self) -> None:
        """As if nothing had ever served."""
        self.current = self._serving = self.staged = self._passed = None
        self.beginnings += 1

    def _distrust(self, version: str, reason: str) -> None:
        self._begin()
        self._wrong = f"{version} does not serve as it was loaded: {reason}"
        metrics.DISTRUSTED.inc()
        _log.error("weights distrusted", version=version, reason=reason)


@asynccontextmanager
async def _within(seconds: float, otherwise: str) -> AsyncIterator[None]:
    """Raises Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{otherwise} within {seconds:g} s") from error


def _newer(candidate: str, passed: str | None) -> bool:
    old, new = None if passed is None else parse(passed), parse(candidate)
    return old is None or (new is not None and new > old)
