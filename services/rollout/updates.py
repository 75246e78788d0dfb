"""New weights into the engine: pushed by the trainer, or found on disk by a server that is late or missed a push.

Invariants: one update at a time; a file is verified against its manifest before it is loaded; a version that fails leaves
the serving one as it is; staging or committing a version that is already staged or serving is a success without work, so
a push and the watcher may meet.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout import metrics
from services.rollout.engine.protocol import CommitMode, CommitResult, Engine, StagedWeights
from shared import telemetry, weights
from shared.errors import Conflict, DecodeError, Forbidden, VolleyError, WeightsError
from shared.types import WeightVersion
from shared.weights import Manifest

POLL_S = 1.0
RETRY_BAD_S = 30.0
_MODEL_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)
_log = telemetry.Log("weights")


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that wait beside the serving ones; `timings` are durations in seconds."""

    version: str
    digest: str
    timings: Mapping[str, float]


@dataclass
class Updates:
    """Moves versions from disk into the engine.

    Args:
        root: the only folder weights are read from; None refuses every update.
        model: the engine's own config.json.
        current: the version the engine serves from the start, if any.

    `_passed` is the newest version of the run that the watcher need not look at.
    """

    engine: Engine
    root: Path | None
    model: Mapping[str, Any]
    default_mode: CommitMode = "retract"
    current: str | None = None
    staged: Staged | None = None
    digest: str | None = None
    _passed: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _bad: dict[Path, tuple[float, str]] = field(default_factory=dict[Path, tuple[float, str]])

    def why_not_ready(self) -> str | None:
        """None once weights serve; else what is missing."""
        if self.current is not None:
            return None
        if self._bad:
            path, (_, reason) = next(reversed(self._bad.items()))
            return f"weights {path.name} cannot be loaded: {reason}"
        return f"no weights are published under {self.root} yet"

    async def stage(self, path: str) -> Staged:
        """Loads the checkpoint `path` (its manifest, its folder, or a Hugging Face folder).

        Raises Forbidden, WeightsError or OutOfMemory; then nothing is staged.
        """
        async with self._lock:
            return await self._stage(self._confined(path))

    async def commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        """Raises Conflict if `version` is not staged, or `base_version` is not what serves."""
        async with self._lock:
            return await self._commit(version, base_version, mode)

    async def update(self, path: str, mode: CommitMode | None) -> tuple[Staged, CommitResult]:
        """`stage` and `commit`."""
        async with self._lock:
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

    async def catch_up(self) -> None:
        """Loads the newest version if it is newer; one that failed is tried again after 30 s. Raises as `stage`."""
        assert self.root is not None
        newest = await asyncio.to_thread(weights.newest, self.root)
        if newest is None or not _newer(newest.name, self._passed):
            return
        if self._bad.get(newest, (-RETRY_BAD_S, ""))[0] > time.monotonic() - RETRY_BAD_S:
            return
        try:
            await self.update(str(newest), None)
        except VolleyError as error:
            self._bad.pop(newest, None)
            self._bad[newest] = (time.monotonic(), str(error))
            raise
        self._bad.clear()

    def _now_passed(self) -> str | None:
        """Weights that someone loaded by a name of their own stay until the run publishes something newer than it has now."""
        assert self.root is not None
        newest = weights.newest(self.root)
        named_by_run = self.current is not None and _parse(self.current) is not None
        return self.current if named_by_run or newest is None else newest.name

    def _confined(self, path: str) -> Path:
        if self.root is None:
            raise Forbidden("this server takes no weights", "start it with a run's configuration")
        return weights.confined(self.root, path)

    async def _stage(self, path: Path) -> Staged:
        start = time.perf_counter()
        found = await asyncio.to_thread(_examine, path, self.model)
        if self.current == found.version and self.digest == found.digest:
            return Staged(found.version, found.digest, {})
        if self.staged is not None and (self.staged.version, self.staged.digest) == (found.version, found.digest):
            return self.staged
        verified = time.perf_counter() - start
        self.staged = None
        timings = await self.engine.stage(found)
        self.staged = Staged(found.version, found.digest, {"verify_s": verified, **timings})
        metrics.STAGE_SECONDS.observe(time.perf_counter() - start)
        _log.info("weights staged", version=found.version, **self.staged.timings)
        return self.staged

    async def _commit(self, version: str, base_version: str | None, mode: CommitMode | None) -> CommitResult:
        if version == self.current and (self.staged is None or self.staged.version != version):
            return CommitResult(version, version, 0, 0, 0.0)
        if self.staged is None or self.staged.version != version:
            waiting = self.staged.version if self.staged else "nothing"
            raise Conflict(f"{version} is not staged (staged: {waiting}, serving: {self.current})", "POST /weights/stage first")
        if base_version is not None and base_version != self.current:
            raise Conflict(f"{version} builds on {base_version}, but {self.current} is serving")
        result = await self.engine.commit(version, mode or self.default_mode)
        self.current, self.digest, self.staged = version, self.staged.digest, None
        self._passed = await asyncio.to_thread(self._now_passed)
        metrics.PAUSE_SECONDS.observe(result.pause_s)
        _log.info("weights committed", version=version, previous=result.previous, continued=result.continued, pause_s=result.pause_s)
        return result


def _examine(path: Path, model: Mapping[str, Any]) -> StagedWeights:
    """Verifies a checkpoint without loading it. Blocks on disk. Raises WeightsError or Forbidden."""
    folder = path.parent if path.name == weights.MANIFEST else path
    if not (folder / weights.MANIFEST).is_file():
        return _hugging_face(folder)
    manifest = weights.read_manifest(folder)
    if manifest.kind != "full":
        raise WeightsError(f"{manifest.version} is of kind {manifest.kind!r}; this server loads full weights")
    _same_model(manifest, model)
    weights.verify_files(folder, manifest)
    digest = hashlib.sha256("".join(f.name + f.blake3 for f in manifest.files).encode()).hexdigest()
    staged = StagedWeights(str(weights.confined(folder, manifest.path)), manifest.version, digest)
    if manifest.probe is None:
        return staged
    ids, logprobs = np.array(manifest.probe.input_ids, np.int32), np.array(manifest.probe.logprobs, np.float32)
    return replace(staged, probe_ids=ids, probe_logprobs=logprobs)


def _hugging_face(folder: Path) -> StagedWeights:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds neither {weights.MANIFEST} nor .safetensors files")
    stamp = "".join(f"{f.name}{f.stat().st_size}{f.stat().st_mtime_ns}" for f in files)
    return StagedWeights(str(folder), folder.name, hashlib.sha256(stamp.encode()).hexdigest(), "hf")


def _same_model(manifest: Manifest, model: Mapping[str, Any]) -> None:
    for key in _MODEL_KEYS:
        if key in manifest.model and key in model and manifest.model[key] != model[key]:
            raise WeightsError(f"{manifest.version} is of another model: {key} is {manifest.model[key]}, this server's is {model[key]}")


def _newer(candidate: str, passed: str | None) -> bool:
    old = None if passed is None else _parse(passed)
    return old is None or WeightVersion.parse(candidate) > old


def _parse(version: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(version)
    except DecodeError:
        return None
