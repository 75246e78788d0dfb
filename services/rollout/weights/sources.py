"""Sources of the engine's weights: a folder, the run's bucket, or published chunks.

A source is opened for one update: its manifest is read, and `found` says what to stage. `load` brings the weights into
the engine, and fails if they have changed since.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from services.rollout.engines.base import Engine
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine, examine_published
from services.rollout.weights.pulling import ChunkPuller, WantedVersion
from services.rollout.weights.serving import StagedUpdate
from shared.errors import Forbidden, WeightsError
from shared.files.addresses import is_address
from shared.files.reading import confined
from shared.models.config import ModelConfig
from shared.published.manifest import Chunk, Delta, PublishedManifest, WeightOffer
from shared.published.order import drawn
from shared.run import checkpoint_files
from shared.types import WeightVersion


class OpenedWeights(Protocol):
    """Weights to stage; `run_id` identifies the run that published them, if it is known."""

    @property
    def found(self) -> StagedWeights: ...

    @property
    def run_id(self) -> str | None: ...

    async def load(self, engine: Engine) -> StagedUpdate:
        """Raises WeightsError, Unavailable, OutOfMemory and StorageFull."""
        ...


@dataclass(frozen=True, slots=True)
class WeightsInFolder:
    """Checkpoint or Hugging Face folder at `path`; `read` reads its manifest."""

    path: Path
    read: Callable[[], StagedWeights]
    found: StagedWeights
    run_id: None = None

    @classmethod
    async def opened(cls, path: Path, read: Callable[[], StagedWeights]) -> Self:
        """Raises WeightsError, Forbidden."""
        return cls(path, read, await asyncio.to_thread(read))

    async def load(self, engine: Engine) -> StagedUpdate:
        loaded = await engine.stage(self.found)
        again = await asyncio.to_thread(self.read)
        if (again.version, again.digest) != (self.found.version, self.found.digest):
            raise WeightsError(f"{self.found.version} changed while it was loaded")
        return StagedUpdate.of(self.found, self.path, loaded)


class VersionStore(Protocol):
    """Versions of the run at addresses of a bucket, provided by a package (part `bucket.versions`)."""

    def opened(self, address: str, model: ModelConfig, run: str) -> AbstractAsyncContextManager[OpenedWeights]:
        """Open a version of this model and run, whose files are copied when it is loaded.

        Raises Forbidden, NotFound, WeightsError, Unavailable and StorageFull.
        """
        ...


@dataclass(frozen=True, slots=True)
class WeightsInChunks:
    """Published version. Chunks stay for the next try, and for other servers, if loading fails.

    `retained` are the chunks of the serving weights, which others may be pulling.
    """

    puller: ChunkPuller
    offer: WeightOffer
    manifest: PublishedManifest
    found: StagedWeights
    seed: int
    retained: frozenset[str]

    @classmethod
    async def opened(
        cls, puller: ChunkPuller, offer: WeightOffer, model: ModelConfig, run: str, retained: frozenset[str]
    ) -> Self:
        """Raises WeightsError, Unavailable."""
        manifest, seed = await pulled_manifest(puller, offer), random.getrandbits(32)
        found = examine_published(manifest, puller.chunks.folder, model, run)
        return cls(puller, offer, manifest, replace(found, seed=seed), seed, retained)

    @property
    def run_id(self) -> str | None:
        return self.manifest.run_id

    async def load(self, engine: Engine) -> StagedUpdate:
        chunks = {chunk.blake3: chunk for tree in self.manifest.trees for chunk in drawn(tree.chunks, self.seed)}
        deltas = await asyncio.to_thread(lambda: [one for c in chunks.values() for one in self._deltas(c)])
        name = self.offer.manifest.blake3
        passed_on = frozenset([name, *chunks, *(delta.chunk.blake3 for delta in deltas)])
        bases = [delta.base for delta in deltas]  # also those of a pull that was overtaken
        await self.puller.retain(self.retained.union(passed_on, bases))
        version = WantedVersion(name, list(self.manifest.chunks()))
        async with self.puller.pull_in_background(
            chunks.values(), self.offer.sources, self._deltas, version
        ) as pulling:
            staged = StagedUpdate.of(self.found, None, await engine.stage(self.found, pulling))
            pulled = await pulling
        timings = {**pulled, **staged.timings}
        return replace(staged, timings=timings, manifest=name, run_id=self.run_id, chunks=passed_on)

    def _deltas(self, chunk: Chunk) -> list[Delta]:
        return self.manifest.delta_chain(chunk, self.puller.chunks.__contains__)


@dataclass(frozen=True, slots=True)
class WeightSources:
    """Sources of a server's weights; it refuses those that are None. See `WeightUpdater` for the attributes."""

    root: Path | None
    puller: ChunkPuller | None
    bucket: VersionStore | None
    model: ModelConfig
    run: str

    @asynccontextmanager
    async def opened(
        self, wanted: str | WeightOffer, name: str | None, retained: frozenset[str], announced: WeightVersion | None
    ) -> AsyncIterator[tuple[OpenedWeights, WeightVersion | None]]:
        """Open wanted weights; also yields the run's newest known version.

        Args:
            name: the version of a Hugging Face folder.
            retained: chunks of the serving weights.
            announced: newest version that the trainer has announced.

        Raises Forbidden, NotFound, WeightsError, Unavailable and StorageFull.
        """
        if isinstance(wanted, WeightOffer):
            if self.puller is None:
                raise Forbidden("this server takes no weights", "start it with a run's configuration")
            yield await WeightsInChunks.opened(self.puller, wanted, self.model, self.run, retained), announced
        elif self.root is None:
            raise Forbidden("this server takes no weights", "start it with rollout.weights_root=FOLDER")
        elif not is_address(wanted):
            path = confined(self.root, wanted)
            opened = await WeightsInFolder.opened(path, partial(examine, path, self.model, self.run, name))
            yield opened, await asyncio.to_thread(self.newest_in_folder)
        elif self.bucket is None:
            raise Forbidden(f"{wanted[:200]}: this run has no bucket", "set run.bucket")
        else:
            async with self.bucket.opened(wanted, self.model, self.run) as copied:
                yield copied, announced

    def newest_in_folder(self) -> WeightVersion | None:
        """Return the newest version in the run's folder."""
        newest = None if self.root is None else checkpoint_files.newest(self.root)
        return WeightVersion.parse(newest.name) if newest else None


async def pulled_manifest(puller: ChunkPuller, offer: WeightOffer) -> PublishedManifest:
    """Pull a version's manifest. Raises WeightsError, Unavailable."""
    await puller.pull([offer.manifest], offer.sources)
    data = await asyncio.to_thread(puller.chunks.read, offer.manifest.blake3)
    manifest = await asyncio.to_thread(PublishedManifest.from_json, data)
    if manifest.version != offer.version:
        raise WeightsError(f"the offer of {offer.version} names the manifest of {manifest.version}")
    return manifest
