"""Move weight versions into the engine.

All updates go through `update`. The trainer announces each version and its sources; a server that has just started or
missed an announcement asks the trainer, and watches the folder of checkpoints while no trainer answers.

Invariants: one update at a time; the engine loads the same bytes that it has hashed, and reads them once; a version
that fails leaves the serving one unchanged; a server never goes back to an older version of the same run; staging or
committing a version that is already staged or serving succeeds without work, so an announcement and the watcher may
coincide; while a version is held, no other one is committed. The engine's arrays are checked after every commit and
every `AUDIT_S`. If they differ from those loaded, the server sends no answers, not even for requests that finish after
the next commit, which empties the prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.rollout import metrics
from services.rollout.engines.base import Engine
from services.rollout.engines.staged import CommitMode, CommitResult, Live, StagedWeights
from services.rollout.weights.failures import FailedVersion, LoadFailures, content_of
from services.rollout.weights.fence import VersionFence
from services.rollout.weights.holds import VersionHolds
from services.rollout.weights.pulling import ChunkPuller
from services.rollout.weights.serving import (
    Distrusted,
    NothingServes,
    Serving,
    ServingState,
    StagedUpdate,
    is_newer,
    why_not_ready,
)
from services.rollout.weights.sources import VersionStore, WeightSources, pulled_manifest
from services.rollout.weights.update_lock import UpdateLock
from shared.engines import DeclaredEngine
from shared.errors import Conflict, NotFound, Unavailable, VolleyError, WeightsError
from shared.models.config import ModelConfig
from shared.process import telemetry
from shared.published.holding import Holding
from shared.published.manifest import WeightOffer
from shared.run import checkpoint_files
from shared.types import WeightVersion

POLL_S, POLL_SERVING_S = 1.0, 3.0
AUDIT_S, REPORT_S = 30.0, 3.0
_log = telemetry.Log("weights")


@dataclass
class WeightUpdater:
    """Loads versions and makes them serve.

    Args:
        root: folder that paths of weights must lie in; None refuses paths.
        model: the engine's model.
        run: name of the run whose weights are accepted.
        dtype: the engine's.
        state: weights that the engine serves from the start.
        puller: pulls published versions; None refuses them.
        newest_offer: asks the trainer for its newest version; raises VolleyError.
        bucket: reads versions in the run's bucket; None refuses their addresses.
        declared: the engine's kind and capabilities (see `engines.base.Engine`).

    `staged` is loaded and not yet committed. The watcher retries a failed version after a pause, and never one that was
    refused for good (`failures`).
    """

    engine: Engine
    root: Path | None
    model: ModelConfig
    run: str
    default_mode: CommitMode = "retract"
    dtype: str = "float32"
    state: ServingState = field(default_factory=NothingServes)
    staged: StagedUpdate | None = None
    puller: ChunkPuller | None = None
    newest_offer: Callable[[], Awaitable[WeightOffer]] | None = None
    bucket: VersionStore | None = None
    declared: DeclaredEngine = field(default_factory=lambda: DeclaredEngine("sglang_jax"))
    _announced: WeightVersion | None = None
    _failures: LoadFailures = field(default_factory=LoadFailures)
    _fence: VersionFence = field(default_factory=VersionFence)
    _lock: UpdateLock = field(default_factory=UpdateLock)
    _holds: VersionHolds = field(default_factory=VersionHolds)
    _arriving: str | None = None
    _is_committing: bool = False

    @property
    def current(self) -> str | None:
        return self.state.version if isinstance(self.state, Serving) else None

    @property
    def digest(self) -> str | None:
        return self._serving.digest if self._serving else None

    @property
    def _serving(self) -> StagedUpdate | None:
        return self.state.update if isinstance(self.state, Serving) else None

    @property
    def _sources(self) -> WeightSources:
        return WeightSources(self.root, self.puller, self.bucket, self.model, self.run)

    @property
    def arriving(self) -> str | None:
        """Published version that is being loaded."""
        return self._arriving

    @property
    def refused(self) -> FailedVersion | None:
        """Newest version, if it was refused for good and is not loaded again."""
        return self._failures.final

    def why_not_ready(self) -> Unavailable | None:
        """Return the reason why no weights serve; None if they do."""
        return why_not_ready(self.state, self._failures.last)

    async def stage(self, wanted: str | WeightOffer) -> StagedUpdate:
        """Load weights while the serving ones stay in place.

        Args:
            wanted: a published version; the path of a checkpoint's manifest or folder, or of a Hugging Face folder; or
                the address of a checkpoint in the run's bucket.

        Raises Forbidden, NotFound, WeightsError, Conflict, Unavailable or OutOfMemory; then nothing is staged.
        """
        async with self._lock.for_update():
            return await self._stage(wanted)

    async def commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        """Make the staged `version` serve.

        Raises Conflict if `version` is not staged or `base_version` does not serve; WeightsError if the engine's arrays
        are then not those that were loaded; InputError for a mode that the engine does not have.
        """
        mode = mode or self.default_mode
        self.declared.check_mode(mode)
        while True:
            await self._holds.passed(version)
            async with self._lock.for_update():
                if not self.is_held(version):
                    return await self._commit(version, base_version, mode)

    async def update(
        self, wanted: str | WeightOffer, mode: CommitMode | None, name: str | None = None
    ) -> tuple[StagedUpdate, CommitResult]:
        """Stage and commit; `name` is the version of a Hugging Face folder. Raises as both.

        While another version is held, the staged one waits for its commit (`held_s` of its timings). A published
        version that was refused for good is refused again without being read.
        """
        mode = mode or self.default_mode
        self.declared.check_mode(mode)
        if not isinstance(wanted, WeightOffer):
            return await self._update(wanted, mode, name)
        offered = wanted.version, wanted.manifest.blake3
        self._failures.check(*offered)
        with self._failures.recording(*offered) if is_newer(wanted.version, self.state) else nullcontext():
            return await self._update(wanted, mode, name)

    async def _update(
        self, wanted: str | WeightOffer, mode: CommitMode, name: str | None
    ) -> tuple[StagedUpdate, CommitResult]:
        held_s = 0.0
        while True:
            async with self._lock.for_update():
                self._arriving = wanted.version if isinstance(wanted, WeightOffer) else None
                try:
                    staged = await self._stage(wanted, name)
                    if not self.is_held(staged.version):
                        timed = replace(staged, timings={**staged.timings, "held_s": held_s}) if held_s else staged
                        return timed, await self._commit(staged.version, None, mode)
                finally:
                    self._arriving = None
            started = time.perf_counter()
            await self._holds.passed(staged.version)
            held_s += time.perf_counter() - started

    def is_held(self, version: str) -> bool:
        """True if another version is held, so that `version` cannot be committed now."""
        return self._holds.blocks(version)

    def hold(self, holder: str, version: str, seconds: float) -> None:
        """Keep `version` serving for `seconds`, at most `MAX_S`; 0 releases it (see `VersionHolds`).

        Raises Conflict if it neither serves nor is being loaded.
        """
        if seconds and version not in (self._arriving, None if self._is_committing else self.current):
            raise Conflict(f"{version} cannot be held: it is not serving here (serving: {self.current})")
        self._holds.take(holder, version, seconds)

    def read_chunk(self, digest: str) -> bytes:
        """Read a chunk for another server. Raises NotFound; it blocks."""
        return self._puller_for_others().chunks.read(digest)

    def holding(self, manifest: str) -> Holding:
        """Return which chunks of a version other servers may pull from here. Raises NotFound."""
        return self._puller_for_others().holding(manifest)

    def _puller_for_others(self) -> ChunkPuller:
        if self.puller is None:
            raise NotFound("this server does not share weights")
        return self.puller

    async def watch(self) -> None:
        """Worker that loads the run's newest version whenever it is newer than the serving one."""
        while self.root is not None or self.newest_offer is not None:
            try:
                await self.catch_up()
            except VolleyError as error:
                _log.warning("update failed", detail=str(error), current=self.current)
            await asyncio.sleep(POLL_S if self.current is None else POLL_SERVING_S)

    async def guard(self) -> None:
        """Worker that audits the serving weights every `AUDIT_S`, or asks for their version every `REPORT_S`."""
        is_reported = "audit" in self.declared.lacks
        while True:
            await asyncio.sleep(REPORT_S if is_reported else AUDIT_S)
            try:
                await self.audit()
            except Unavailable as error:
                (_log.debug if is_reported else _log.warning)("audit postponed", detail=str(error))

    async def audit(self) -> None:
        """Stop serving if the engine's arrays, or their version, are not those that were loaded. Raises Unavailable.

        The watcher then loads the weights again.
        """
        async with self._lock.for_check():
            await self._check_live()

    async def _check_live(self) -> None:
        if self._serving is not None:
            found = self._serving.difference(await self.engine.audit(), self.dtype)
            if found is not None:
                self._distrust(self._serving.version, found)

    async def catch_up(self) -> None:
        """Load the newest version if it is newer and its last failure does not delay it. Raises as `update`."""
        if self._holds.any():
            return  # one waiting version is enough: the trainer sends it, or the next look finds it
        offer = await self._offered()
        if offer is not None:
            await self._forget_if_run_restarted(offer)
            await self._load_newer(offer.version, offer)
        elif self.root is not None:
            newest = await self._newest_folder(self.root)
            if newest is not None:
                await self._load_newer(newest.name, str(newest))

    async def _load_newer(self, version: str, wanted: str | WeightOffer) -> None:
        if not is_newer(version, self.state):
            return
        published = isinstance(wanted, WeightOffer)
        content = wanted.manifest.blake3 if published else await asyncio.to_thread(content_of, Path(wanted))
        if not self._failures.delays(version, content):
            with nullcontext() if published else self._failures.recording(version, content):
                await self.update(wanted, None)

    async def _offered(self) -> WeightOffer | None:
        """Ask the trainer for its newest version; None while it does not answer."""
        if self.newest_offer is None:
            return None
        try:
            offer = await self.newest_offer()
        except VolleyError as error:
            _log.debug("no version offered by the trainer", reason=str(error))
            return None
        self._announced = WeightVersion.parse(offer.version)
        return offer

    async def _forget_if_run_restarted(self, offer: WeightOffer) -> None:
        """Forget the serving weights if the run was restarted since: its trainer then names another run id."""
        served, puller = self._fence.served, self.puller
        if puller is None or served is None or served.run_id is None or served.manifest == offer.manifest.blake3:
            return
        async with self._lock.for_update():
            if (await pulled_manifest(puller, offer)).run_id != served.run_id:
                self._forget(offer.version)

    async def _newest_folder(self, root: Path) -> Path | None:
        async with self._lock.for_check():
            newest = await asyncio.to_thread(checkpoint_files.newest, root)
            if newest is not None and await asyncio.to_thread(self._fence.run_was_restarted, newest):
                self._forget(newest.name)
        return newest

    def _forget(self, newest: str) -> None:
        _log.warning("run restarted from an empty folder", newest=newest, current=self.current)
        self.state, self.staged = NothingServes(self.state.n_resets + 1), None
        self._fence, self._failures, self._holds = VersionFence(), LoadFailures(), VersionHolds()

    async def _stage(self, wanted: str | WeightOffer, name: str | None = None) -> StagedUpdate:
        start = time.perf_counter()
        retained = self._serving.chunks if self._serving else frozenset[str]()
        async with self._sources.opened(wanted, name, retained, self._announced) as (opened, newest):
            self._fence.check(opened.found, newest, self._serving, opened.run_id)
            if (same := self._loaded_already(opened.found)) is not None:
                return same
            self.staged = None
            staged = await opened.load(self.engine)
        self.staged = staged
        metrics.STAGE_SECONDS.observe(time.perf_counter() - start)
        _log.info("weights staged", version=staged.version, **staged.timings)
        return staged

    def _loaded_already(self, found: StagedWeights) -> StagedUpdate | None:
        """Return the serving or staged weights if they are the ones that were found; else None."""
        updates = (update for update in (self._serving, self.staged) if update is not None)
        return next((one for one in updates if (one.version, one.digest) == (found.version, found.digest)), None)

    async def _commit(self, version: str, base_version: str | None, mode: CommitMode) -> CommitResult:
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
        if self.current is None and mode == "in_place":
            mode = "retract"
        elif version == self.current and self._serving and staged.checksum == self._serving.checksum != "":
            mode = "in_place"  # the same arrays from another source: running requests keep their keys and values
        self._is_committing = True
        try:
            return await self._replace(staged, mode)
        finally:
            self._is_committing = False

    async def _replace(self, staged: StagedUpdate, mode: CommitMode) -> CommitResult:
        version = staged.version
        passed = version if WeightVersion.of_name(version) is not None else await asyncio.to_thread(self._newest_name)
        try:
            result = await self.engine.commit(version, mode)
        except asyncio.CancelledError:
            self._distrust(version, "its commit was not answered")
            raise
        except (WeightsError, Unavailable):
            await self._check_live()
            raise
        wrong = staged.difference(result.live, self.dtype)  # no await before: not one answer passes in between
        if wrong is not None:
            self._distrust(version, wrong)
            raise WeightsError(
                f"{version} was committed, but {wrong}",
                "the server accepts no requests until other weights are committed",
            )
        self.state, self.staged = Serving(version, staged, passed, self.state.n_resets), None
        self._fence.advance(staged)
        if self.puller is not None:
            await self.puller.retain(staged.chunks)
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
        """Return the run's newest known version; weights with a name of their own serve until a newer one comes."""
        known = [version for version in (self._announced, self._sources.newest_in_folder()) if version]
        return str(max(known)) if known else None

    def _distrust(self, version: str, reason: str) -> None:
        self.state = Distrusted(
            f"{version} differs from the weights that were loaded: {reason}", self.state.n_resets + 1
        )
        self.staged = None
        metrics.DISTRUSTED.inc()
        _log.error("weights distrusted", version=version, reason=reason)
