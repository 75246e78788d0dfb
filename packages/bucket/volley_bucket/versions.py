"""Copy versions from the run's bucket into a folder of this server's own, and load them as any other checkpoint.

The manifest is copied first; nothing else is copied if it names another run or model, or more bytes than the model's
weights can have. The engine hashes the copied files. The copy is removed when the weights are loaded or have failed.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from services.rollout import metrics
from services.rollout.engines.base import Engine
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import check_bytes, examine
from services.rollout.weights.serving import StagedUpdate
from shared.errors import Forbidden, Unavailable, WeightsError
from shared.files.addresses import is_address
from shared.files.reading import confined
from shared.files.storage import storage
from shared.models.config import ModelConfig
from shared.run import checkpoint_files
from shared.run.checkpoint_files import ManifestFile
from volley_bucket.objects import Bucket, check_names, is_key


class CheckpointBucket:
    """Args: address: of the run's bucket; scratch: this server's folder for copies, emptied at the start."""

    def __init__(self, address: str, scratch: Path) -> None:
        self._bucket, self._scratch = Bucket(address), scratch
        shutil.rmtree(scratch, ignore_errors=True)

    @asynccontextmanager
    async def opened(self, address: str, model: ModelConfig, run: str) -> AsyncIterator[WeightsInBucket]:
        """Open a version by its address or its manifest's, below the bucket's; only its manifest is copied so far.

        Raises Forbidden for any other address, NotFound, WeightsError, Unavailable and StorageFull.
        """
        start = time.perf_counter()
        below = (
            address.rstrip("/").removesuffix(f"/{checkpoint_files.MANIFEST}").removeprefix(f"{self._bucket.address}/")
        )
        if is_address(below) or not is_key(below):
            raise Forbidden(f"{address[:200]} is not in {self._bucket.address}", "this is the run's bucket: run.bucket")
        copy = CheckpointCopy(self._bucket, below, self._scratch / secrets.token_hex(8))
        try:
            await asyncio.to_thread(copy.begin)
            yield WeightsInBucket(copy, await asyncio.to_thread(copy.examine, model, run), start)
        finally:
            await asyncio.to_thread(copy.remove)


class CheckpointCopy:
    """Copy of one version in `{root}/{version}/`, and of its base, laid out as a run's folder. Every method blocks."""

    def __init__(self, bucket: Bucket, below: str, root: Path) -> None:
        self._bucket, self._below, self._root = bucket, below, root
        self.folder = root / Path(below).name
        self._is_wanted, self._manifest = True, b""

    def begin(self) -> None:
        """Raises as `CheckpointBucket.opened`."""
        self._manifest = self._read_manifest()
        adapter = checkpoint_files.Manifest.from_json(self._manifest).adapter
        with storage(self._root.parent.parent):
            self.folder.mkdir(parents=True)
            (self.folder / checkpoint_files.MANIFEST).write_bytes(self._manifest)
            if adapter is not None:
                confined(self._root, adapter.base.folder(self._root)).mkdir(parents=True)

    def examine(self, model: ModelConfig, run: str) -> StagedWeights:
        """Read what to stage from the copy. Raises WeightsError, Forbidden."""
        found = examine(self.folder, model, run)
        for _, folder, files in self._trees(found):
            check_names((file.name for file in files), checkpoint_files.MANIFEST)
            check_bytes(folder.name, sum(file.size for file in files), model)
        return found

    def fetch(self, found: StagedWeights) -> int:
        """Copy the files. Returns their size in bytes.

        Raises as `Bucket.download`, Forbidden for a name that leads outside the folder, and StorageFull.
        """
        wanted = [(below, folder, file) for below, folder, files in self._trees(found) for file in files]
        for below, folder, file in wanted:
            path = confined(folder, file.name)
            with storage(self._root.parent.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._bucket.download(f"{below}/{file.name}", path, file.size, self._check)
        return sum(file.size for *_, file in wanted)

    def _trees(self, found: StagedWeights) -> list[tuple[str, Path, Sequence[ManifestFile]]]:
        """Return key in the bucket, folder of the copy and files: of the version, and of its base if it has one."""
        trees: list[tuple[str, Path, Sequence[ManifestFile]]] = [(self._below, self.folder, found.files)]
        if found.base is not None:
            below = Path(self._below).parent / checkpoint_files.BASE / found.base.digest
            trees.append((str(below), Path(found.base.folder), found.base.files))
        return trees

    def remove(self) -> None:
        self._is_wanted = False
        shutil.rmtree(self._root, ignore_errors=True)

    def check_unchanged(self) -> None:
        """Raises WeightsError if the version's manifest has changed since it was opened, and as `begin`."""
        if self._read_manifest() != self._manifest:
            raise WeightsError(f"{self.folder.name} changed while it was loaded")

    def _read_manifest(self) -> bytes:
        return self._bucket.read(f"{self._below}/{checkpoint_files.MANIFEST}", checkpoint_files.MAX_MANIFEST_BYTES)

    def _check(self) -> None:
        if not self._is_wanted:
            raise Unavailable(f"nobody waits for {self.folder.name} any more")


@dataclass(frozen=True, slots=True)
class WeightsInBucket:
    """Version in the run's bucket; `started` is the time of `perf_counter` before it was opened."""

    copy: CheckpointCopy
    found: StagedWeights
    started: float
    run_id: None = None

    async def load(self, engine: Engine) -> StagedUpdate:
        n_bytes = await asyncio.to_thread(self.copy.fetch, self.found)
        metrics.PULLED.inc(n_bytes)
        pulled = {"pull_s": time.perf_counter() - self.started, "pulled_bytes": n_bytes}
        staged = StagedUpdate.of(self.found, None, await engine.stage(self.found))
        await asyncio.to_thread(self.copy.check_unchanged)
        return replace(staged, timings={**pulled, **staged.timings})
