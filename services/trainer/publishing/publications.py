"""Published weights: chunks and manifests of the newest versions, in a folder of the incarnation's own.

Invariants: servers see a version only once it is announced, after its step was committed. The newest announced version
is kept whole, with the one before it, which servers may still be pulling, and the deltas from the last versions. Each
incarnation has its own folder below `root`, so a replaced trainer removes nothing of its successor's.
"""

from __future__ import annotations

import math
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.trainer.publishing.run_id import run_id
from shared.errors import NotFound
from shared.published.chunks import ChunkFolder, cut, in_order
from shared.published.delta import encode
from shared.published.manifest import (
    MAX_MANIFEST_BYTES,
    Chunk,
    Delta,
    PublishedAdapter,
    PublishedManifest,
    WeightTree,
    leaf_bytes,
)
from shared.run.checkpoint_files import ManifestLeaf, Probe
from shared.types import WeightVersion

_MIN_KEPT, _MAX_KEPT = 2, 4
_ASKED_S = 10.0
_N_DELTAS = 8
"""Versions with deltas; a server that missed more pulls whole chunks."""
_N_THREADS = 4
"""Threads that hash, compare and write chunks while the next array is copied."""

type Arrays = Mapping[str, Callable[[], np.ndarray]]
"""Functions that copy each array to the host, by name, in its published dtype."""


@dataclass(frozen=True, slots=True)
class ModelToPublish:
    """A model's arrays, their names and shapes, config.json and probe; with an `adapter`, the arrays of adapters."""

    leaves: Sequence[ManifestLeaf]
    arrays: Arrays
    config: Mapping[str, Any]
    probe: Probe | None
    adapter: PublishedAdapter | None = None


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version whose chunks are written.

    `manifest` has digest and size of the version's manifest; `digest` is that of its weights, in hex; `n_bytes` is the
    size of the weights, `delta_bytes` that of the deltas from the version before; `timings` are seconds.
    """

    version: WeightVersion
    manifest: Chunk
    digest: str
    n_bytes: int
    delta_bytes: int
    timings: Mapping[str, float]


class ModelPublications(Protocol):
    """Methods of `Publications` that publish versions of the model."""

    def publish(self, version: WeightVersion, model: ModelToPublish) -> PublishedVersion: ...

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree: ...


@dataclass
class _KeptChunks:
    """A version's chunks, and the monotonic time of their last request."""

    chunks: frozenset[str]
    asked: float = 0.0


class Publications:
    """Chunks of the newest versions. Every method may block. One thread publishes; any may read.

    Args:
        root: folder of the chunks; if it is lost, they are made again.
        run: name of the run.
    """

    def __init__(self, root: Path, run: str) -> None:
        self._root, self._run = root, run
        self._chunks: ChunkFolder | None = None
        self._kept = list[_KeptChunks]()
        self._base: WeightTree | None = None
        self._last: WeightTree | None = None
        self._deltas = deque[dict[str, Delta]](maxlen=_N_DELTAS)  # of the last versions, by the resulting chunk
        self.newest: PublishedVersion | None = None
        self.has_lost = False
        """True if a requested chunk of the newest version is missing, so the version must be published again."""

    def publish(self, version: WeightVersion, model: ModelToPublish) -> PublishedVersion:
        """Write the arrays' chunks and manifest, which servers see only after `announce`.

        Raises StorageFull, StorageDenied.
        """
        started = time.perf_counter()
        self.has_lost = False
        store = self._open(version.epoch)
        weights, take_s = self._written(store, model.leaves, model.arrays, self._last)
        identity = self._run, self.run_id(), str(version)
        plain = PublishedManifest(*identity, weights, model.config, model.probe, time.time(), model.adapter)
        manifest, data = self._with_deltas(plain)
        deltas = manifest.deltas
        digest, self._last = store.put(data), weights
        made_of = [delta.chunk.blake3 for delta in deltas.values()]
        self._retain(store, frozenset([digest, *manifest.chunks(), *made_of]))
        delta_bytes = sum(delta.chunk.size for delta in self._deltas[-1].values()) if self._deltas else 0
        timings = {"take_s": take_s, "chunk_s": time.perf_counter() - started - take_s}
        return PublishedVersion(
            version, Chunk(digest, len(data)), manifest.digest, weights.n_bytes, delta_bytes, timings
        )

    def _with_deltas(self, manifest: PublishedManifest) -> tuple[PublishedManifest, bytes]:
        """Add deltas of as many versions as fit into a manifest; return it and its JSON."""
        while True:
            deltas = {name: delta for of_version in self._deltas for name, delta in of_version.items()}
            made = replace(manifest, deltas=deltas)
            data = made.to_json()
            if len(data) <= MAX_MANIFEST_BYTES or not self._deltas:
                return made, data
            self._deltas.popleft()

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree:
        """Write the chunks of the adapters' base once, and keep them. Raises as `publish`."""
        store = self._open(epoch)
        if self._base is None:
            self._base = self._written(store, leaves, arrays, None)[0]
            self._deltas.clear()
        return self._base

    def announce(self, published: PublishedVersion) -> None:
        """Make it the newest version that servers may load."""
        self.newest = published

    def read(self, digest: str) -> bytes:
        """Read a chunk or a manifest of a kept version.

        Raises NotFound, and WeightsError or Unavailable if it cannot be read.
        """
        kept = [one for one in self._kept if digest in one.chunks]
        if self._chunks is None or not kept:
            raise NotFound(f"chunk {digest} belongs to none of the kept versions")
        for one in kept:
            one.asked = time.monotonic()
        try:
            return self._chunks.read(digest)
        except NotFound:
            self.has_lost = kept[-1] is self._kept[-1]
            raise

    def close(self) -> None:
        if self._chunks is not None:
            shutil.rmtree(self._chunks.folder, ignore_errors=True)

    def _written(
        self, store: ChunkFolder, leaves: Sequence[ManifestLeaf], arrays: Arrays, before: WeightTree | None
    ) -> tuple[WeightTree, float]:
        """Write the arrays' chunks; return their tree, and the seconds that copies to the host took.

        Appends to `_deltas` the deltas from the chunks of the tree `before`.
        """
        taken = 0.0

        def timed(take: Callable[[], np.ndarray]) -> np.ndarray:
            nonlocal taken
            started = time.perf_counter()
            value = take()
            taken += time.perf_counter() - started
            return value

        leaves = in_order(leaves)
        width = min((leaf_bytes(leaf) // math.prod(leaf.shape) for leaf in leaves if math.prod(leaf.shape)), default=4)
        old = before.chunks if before is not None and before.leaves == tuple(leaves) else ()

        def keep(base: Chunk | None, data: memoryview) -> tuple[Chunk, Delta | None]:
            chunk = Chunk(store.put(data), len(data))
            if base is None or base == chunk:
                return chunk, None
            try:
                delta = encode(store.read(base.blake3), data, width)
            except (NotFound, ValueError):  # the base was removed or truncated; the chunk itself is written
                return chunk, None
            return chunk, None if delta is None else Delta(base.blake3, Chunk(store.put(delta), len(delta)))

        parts = cut(leaves, {name: partial(timed, take) for name, take in arrays.items()})
        kept = list(_beside(keep, zip(chain(old, repeat(None)), parts, strict=False)))
        self._deltas.append({chunk.blake3: delta for chunk, delta in kept if delta is not None})
        return WeightTree(tuple(leaves), tuple(chunk for chunk, _ in kept)), taken

    def _open(self, epoch: int) -> ChunkFolder:
        """Open this incarnation's folder; the first call creates it and removes those of earlier trainers."""
        if self._chunks is None:
            ours = f"e{epoch:06d}-{secrets.token_hex(4)}"
            self._chunks = ChunkFolder(self._root / ours)
            for path in self._root.glob("e*-*"):
                if path.name[:7] <= ours[:7] and path.name != ours:
                    shutil.rmtree(path, ignore_errors=True)
        return self._chunks

    def run_id(self) -> str:
        """Identifier of the run (see `publishing.run_id`). Blocks."""
        return run_id(self._root)

    def _retain(self, store: ChunkFolder, chunks: frozenset[str]) -> None:
        """Keep the newest versions and those that servers are pulling; remove other chunks."""
        since = time.monotonic() - _ASKED_S
        older = self._kept[-_MAX_KEPT + 1 :]
        n_old = max(0, len(older) - _MIN_KEPT + 1)
        self._kept = [*(one for one in older[:n_old] if one.asked > since), *older[n_old:], _KeptChunks(chunks)]
        of_base = {chunk.blake3 for chunk in self._base.chunks} if self._base else set[str]()
        store.retain(of_base.union(*(one.chunks for one in self._kept)))


def _beside[T](work: Callable[..., T], given: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Map `work` over `given` in threads, in order; at most a few items are taken ahead."""
    with ThreadPoolExecutor(_N_THREADS, "publish") as pool:
        begun = deque[Future[T]]()
        for one in given:
            begun.append(pool.submit(work, *one))
            if len(begun) > _N_THREADS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
