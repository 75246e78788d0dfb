"""A folder of chunks, each in a file with the name of its digest.

Invariants: a file has its name only once it is whole and has that digest; nobody trusts that it still has: who makes
arrays of chunks takes their digests again, of the bytes it uses. Nothing is made durable: what is lost is asked for
again. A folder belongs to one process.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, count
from pathlib import Path

import blake3
import numpy as np

from shared.errors import NotFound, WeightsError
from shared.files.reading import open_file, read_file
from shared.files.storage import storage
from shared.run.weights import ManifestLeaf, unreadable
from shared.weights.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, Chunk, WeightTree, cuts, leaf_bytes

_DRAFT = ".draft-"
_SHARED = 4


class ChunkFolder:
    """Every method blocks; they may run side by side."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._drafts = folder, count()
        with storage(folder.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def put(self, data: bytes | memoryview) -> str:
        """Its digest, in hex. Raises StorageFull, StorageDenied; then it is not there."""
        digest = blake3.blake3(data).hexdigest()
        if not self._has(digest):
            self._write(digest, data)
        return digest

    def _has(self, digest: str) -> bool:
        """Whether it is here, and still what its name says."""
        try:
            return blake3.blake3(self.read(digest)).hexdigest() == digest
        except (NotFound, WeightsError):
            return False

    def add(self, chunk: Chunk, data: bytes | bytearray) -> bool:
        """Whether the data are that chunk; then they are here. Raises as `put`."""
        if len(data) != chunk.size or blake3.blake3(data).hexdigest() != chunk.blake3:
            return False
        self._write(chunk.blake3, data)
        return True

    def _write(self, digest: str, data: bytes | bytearray | memoryview) -> None:
        draft = self.folder / f"{_DRAFT}{next(self._drafts)}"
        with storage(self.folder):
            try:
                draft.write_bytes(data)
                draft.rename(self.path(digest))
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def read(self, digest: str) -> bytes:
        """Raises NotFound, and WeightsError or Unavailable if it cannot be read."""
        try:
            return read_file(self.path(digest), MAX_MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise NotFound(f"chunk {digest} is not here") from error
        except OSError as error:
            raise unreadable(f"chunk {digest}", error) from error

    def retain(self, digests: Collection[str]) -> None:
        """Removes all others."""
        for path in list(self.folder.iterdir()):
            if path.name not in digests:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        self.retain(())


def in_order(leaves: Iterable[ManifestLeaf]) -> list[ManifestLeaf]:
    """As they lie in the stream: those that share chunks first, so that all others begin one."""
    return sorted(leaves, key=lambda leaf: (leaf_bytes(leaf) >= CHUNK_BYTES, leaf.key))


def cut(leaves: Sequence[ManifestLeaf], arrays: Mapping[str, Callable[[], np.ndarray]]) -> Iterator[memoryview]:
    """The chunks of a stream of arrays, which are made one at a time; each is good until the next is asked for.

    Raises ValueError for an array that has not the bytes that its leaf says.
    """
    sizes = iter(cuts([leaf_bytes(leaf) for leaf in leaves]))
    wanted, begun = next(sizes, 0), bytearray()
    for leaf in leaves:
        rest = _bytes_of(arrays[leaf.key]())
        if len(rest) != leaf_bytes(leaf):
            raise ValueError(f"{leaf.key} has {len(rest)} bytes, its leaf says {leaf_bytes(leaf)}")
        while len(rest):
            if begun or len(rest) < wanted:
                n = wanted - len(begun)
                begun += rest[:n]
                rest = rest[n:]
                if len(begun) < wanted:
                    break
                yield memoryview(begun)
                begun = bytearray()
            else:
                yield rest[:wanted]
                rest = rest[wanted:]
            wanted = next(sizes, 0)


def _bytes_of(value: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def reads(
    folder: Path, tree: WeightTree, what: str, check: Callable[[], None] = lambda: None
) -> dict[str, Callable[[], np.ndarray]]:
    """What makes each array of `tree` out of the chunks in `folder`, by name. The digest of a chunk is taken of the
    very bytes that the array is made of. Beside the array, a few chunks that several share are in memory. `check` is
    called before each chunk, and raises what is to end this.

    An array raises WeightsError if a chunk is missing or has another digest, and Unavailable if it cannot be read now.
    """
    starts = [0, *accumulate(chunk.size for chunk in tree.chunks)]

    def fill(index: int, into: memoryview) -> None:
        check()
        chunk = tree.chunks[index]
        try:
            with open_file(folder / chunk.blake3) as file:
                n = os.readv(file.fileno(), [into])
        except OSError as error:
            raise unreadable(f"{what}: chunk {chunk.blake3}", error) from error
        if n != chunk.size or blake3.blake3(into).hexdigest() != chunk.blake3:
            (folder / chunk.blake3).unlink(missing_ok=True)  # it is asked for again
            raise WeightsError(f"{what}: digest of chunk {chunk.blake3} differs")

    @lru_cache(_SHARED)
    def shared(index: int) -> memoryview:
        held = memoryview(bytearray(tree.chunks[index].size))
        fill(index, held)
        return held

    def array(leaf: ManifestLeaf, start: int) -> np.ndarray:
        value = np.empty(leaf_bytes(leaf), np.uint8)
        data, end = memoryview(value), start + len(value)
        index = bisect_right(starts, start) - 1
        at = start
        while at < end:
            first, size = starts[index], tree.chunks[index].size
            if start <= first and first + size <= end:
                fill(index, data[first - start : first - start + size])
            else:
                last = min(end, first + size)
                data[at - start : last - start] = shared(index)[at - first : last - first]
            at, index = first + size, index + 1
        return value.view(np.dtype(leaf.dtype)).reshape(leaf.shape)

    places = accumulate((leaf_bytes(leaf) for leaf in tree.leaves), initial=0)
    return {leaf.key: partial(array, leaf, at) for leaf, at in zip(tree.leaves, places, strict=False)}
