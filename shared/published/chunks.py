"""A folder of chunks, each in a file named by its digest.

Invariants: a file gets its name only once it is complete and has that digest; readers still check it, and recompute the
digests of the bytes they use. Nothing is made durable: lost chunks are requested again. A folder belongs to one
process.

Files of chunks that are no longer needed are overwritten by later chunks of the same size: filling pages that are in
memory costs a fraction of allocating new ones. A file has no chunk's name while it is overwritten, and is overwritten
only after its readers have ended.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, count
from pathlib import Path

import blake3
import numpy as np

from shared.errors import NotFound, WeightsError
from shared.files.reading import open_file, read_file
from shared.files.storage import storage
from shared.published.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, Chunk, WeightTree, cuts, leaf_bytes
from shared.run.checkpoint_files import ManifestLeaf, unreadable

_DRAFT, _SPARE = ".draft-", ".spare-"
_ALIGNMENT = 64
SPARE_BYTES = 2**20
"""Smaller files, such as those of deltas, are not kept for reuse."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """File of a removed chunk; reads with a smaller number may still use it."""

    number: int
    size: int
    path: Path


class ChunkFolder:
    """Chunks in a folder. Every method blocks; they may run concurrently."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._numbers = folder, count()
        self._lock = threading.Lock()
        self._reading, self._writing = set[int](), set[str]()
        self._spares = list[_Spare]()
        with storage(folder.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def put(self, data: bytes | memoryview) -> str:
        """Store a chunk and return its digest, in hex. Raises StorageFull, StorageDenied; then it is not stored."""
        digest = blake3.blake3(data).hexdigest()
        if not self._has(digest):
            self._write(digest, data)
        return digest

    def _has(self, digest: str) -> bool:
        """True if the chunk is here, and still has its digest."""
        try:
            return blake3.blake3(self.read(digest)).hexdigest() == digest
        except (NotFound, WeightsError):
            return False

    def add(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        """Store the data if they are that chunk; return False otherwise. Raises as `put`."""
        if len(data) != chunk.size or blake3.blake3(data).hexdigest() != chunk.blake3:
            return False
        self._write(chunk.blake3, data)
        return True

    def _write(self, digest: str, data: bytes | memoryview) -> None:
        draft = self.folder / f"{_DRAFT}{next(self._numbers)}"
        with storage(self.folder), self._protected(draft):
            self._restore_folder()
            try:
                with draft.open("r+b" if self._take_spare(draft, len(data)) else "wb") as file:
                    file.write(data)
                draft.rename(self.path(digest))
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def _restore_folder(self) -> None:
        """Recreate the folder if it was removed, but not the run's, which is two levels above."""
        if not self.folder.exists() and self.folder.parent.parent.exists():
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _protected(self, draft: Path) -> Iterator[None]:
        """Keep `retain` from removing the draft."""
        with self._lock:
            self._writing.add(draft.name)
        try:
            yield
        finally:
            with self._lock:
                self._writing.remove(draft.name)

    def _take_spare(self, draft: Path, size: int) -> bool:
        """Rename a removed chunk's file of that size to `draft`; return False if there is none."""
        with self._lock:
            oldest = min(self._reading, default=math.inf)
            found = next((one for one in self._spares if one.size == size and one.number < oldest), None)
            if found is None:
                return False
            self._spares.remove(found)
        try:
            found.path.rename(draft)
        except FileNotFoundError:
            return False
        return True

    def read(self, digest: str) -> bytes:
        """Return a chunk. Raises NotFound, and WeightsError or Unavailable if it cannot be read."""
        with self._read(digest) as path:
            return read_file(path, MAX_MANIFEST_BYTES)

    def read_into(self, digest: str, into: memoryview) -> int:
        """Read a chunk into a buffer; return the number of bytes, at most the buffer's. Raises as `read`."""
        with self._read(digest) as path, open_file(path) as file:
            return os.readv(file.fileno(), [into])

    @contextmanager
    def _read(self, digest: str) -> Iterator[Path]:
        with self._lock:
            self._reading.add(number := next(self._numbers))
        try:
            yield self.path(digest)
        except FileNotFoundError as error:
            raise NotFound(f"chunk {digest} is missing") from error
        except OSError as error:
            raise unreadable(f"chunk {digest}", error) from error
        finally:
            with self._lock:
                self._reading.remove(number)

    def retain(self, digests: Collection[str]) -> None:
        """Remove all other chunks; keep at most as many of their files for reuse."""
        there = list(self.folder.iterdir()) if self.folder.exists() else []
        with self._lock:
            spares, self._spares = self._spares, []
            names = {one.path.name for one in spares}.union(digests, self._writing)
        for path in [path for path in there if path.name not in names]:
            with suppress(FileNotFoundError):
                if digests and (size := path.stat().st_size) >= SPARE_BYTES:
                    spare = path.rename(self.folder / f"{_SPARE}{next(self._numbers)}")
                    spares.append(_Spare(next(self._numbers), size, spare))
                else:
                    path.unlink()
        n_over = max(0, len(spares) - len(digests))
        for one in spares[:n_over]:  # the oldest, of sizes that are not needed
            one.path.unlink(missing_ok=True)
        with self._lock:
            self._spares += spares[n_over:]

    def clear(self) -> None:
        self.retain(())


def in_order(leaves: Iterable[ManifestLeaf]) -> list[ManifestLeaf]:
    """Sort leaves as they lie in the stream: those that share chunks first, so that every other one starts a chunk."""
    return sorted(leaves, key=lambda leaf: (leaf_bytes(leaf) >= CHUNK_BYTES, leaf.key))


def cut(leaves: Sequence[ManifestLeaf], arrays: Mapping[str, Callable[[], np.ndarray]]) -> Iterator[memoryview]:
    """Yield the chunks of a stream of arrays, which are made one at a time; a chunk may be a part of its array.

    Raises ValueError for an array whose size differs from its leaf.
    """
    sizes = iter(cuts([leaf_bytes(leaf) for leaf in leaves]))
    wanted, begun, n_begun = next(sizes, 0), bytearray(), 0
    for leaf in leaves:
        rest = _bytes_of(arrays[leaf.key]())
        if len(rest) != leaf_bytes(leaf):
            raise ValueError(f"{leaf.key} has {len(rest)} bytes, but its leaf has {leaf_bytes(leaf)}")
        while len(rest):
            if n_begun or len(rest) < wanted:
                begun = begun if n_begun else bytearray(wanted)
                n = min(len(rest), wanted - n_begun)
                begun[n_begun : n_begun + n] = rest[:n]
                rest, n_begun = rest[n:], n_begun + n
                if n_begun < wanted:
                    break
                yield memoryview(begun)
                n_begun = 0
            else:
                yield rest[:wanted]
                rest = rest[wanted:]
            wanted = next(sizes, 0)


def _bytes_of(value: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _empty(n_bytes: int) -> np.ndarray:
    """Return uint8[n_bytes], aligned so that JAX on a CPU uses it without a copy."""
    held = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -held.ctypes.data % _ALIGNMENT
    return held[start : start + n_bytes]


def _read(folder: Path, chunk: Chunk, what: str, into: memoryview) -> None:
    """Read a whole chunk and check its digest. Raises as the arrays of `reads`."""
    path = folder / chunk.blake3
    try:
        with open_file(path) as file:
            n, was = os.readv(file.fileno(), [into]), os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(f"{what}: chunk {chunk.blake3}", error) from error
    if n != chunk.size or blake3.blake3(into).hexdigest() != chunk.blake3:
        with suppress(OSError):
            if os.path.samestat(was, path.stat()):  # not a later file of that name
                path.unlink()  # it is requested again
        raise WeightsError(f"{what}: digest of chunk {chunk.blake3} differs")


def reads(
    folder: Path, tree: WeightTree, what: str, wait_for: Callable[[Path], None] = lambda _: None
) -> dict[str, Callable[[], np.ndarray]]:
    """Return functions that make each array of `tree` from the chunks in `folder`, by name.

    A chunk's digest is computed over the very bytes that the array is made of. An array within a chunk is a view of it,
    and the last such chunk stays in memory, so that each is read once in the order of the tree. `wait_for` is called
    with each chunk's path before it is read; it may raise to stop.

    The functions raise WeightsError if a chunk is missing or has another digest, and Unavailable if it cannot be read
    now.
    """
    starts = [0, *accumulate(chunk.size for chunk in tree.chunks)]

    def fill(index: int, into: memoryview) -> None:
        wait_for(folder / tree.chunks[index].blake3)
        _read(folder, tree.chunks[index], what, into)

    @lru_cache(1)
    def shared(index: int) -> np.ndarray:
        held = _empty(tree.chunks[index].size)
        fill(index, memoryview(held))
        return held

    def joined(index: int, start: int, end: int) -> np.ndarray:
        value = _empty(end - start)
        data, at = memoryview(value), start
        while at < end:
            first, size = starts[index], tree.chunks[index].size
            if start <= first and first + size <= end:
                fill(index, data[first - start : first - start + size])
            else:
                last = min(end, first + size)
                data[at - start : last - start] = memoryview(shared(index))[at - first : last - first]
            at, index = first + size, index + 1
        return value

    def array(leaf: ManifestLeaf, start: int) -> np.ndarray:
        end = start + leaf_bytes(leaf)
        index = min(bisect_right(starts, start), len(tree.chunks)) - 1
        first, is_within = starts[index], end <= starts[index + 1]
        value = shared(index)[start - first : end - first] if is_within else joined(index, start, end)
        return np.require(value.view(np.dtype(leaf.dtype)), requirements="A").reshape(leaf.shape)

    places = accumulate((leaf_bytes(leaf) for leaf in tree.leaves), initial=0)
    return {leaf.key: partial(array, leaf, at) for leaf, at in zip(tree.leaves, places, strict=False)}
