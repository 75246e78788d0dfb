"""Archive of trained groups: `archive/e000001/s000042.zst` holds the wire bytes of the groups that made
e000001-s000042.

A file is a stream of zstd frames, each one msgpack value: a header {schema, run, version, n, digests}, then `n` groups
as binary, in training order; `zstd -d` opens it. Writer and reader hold one group at a time.

Invariants:
- A file is whole or absent (written to a temporary name, fsynced, renamed, parent fsynced).
- A file alone proves nothing, because a crash may undo its step: only groups whose digests are in the ledger's lines of
the surviving lineage count.
- An undone step lies under the epoch that made it, so it never mixes with the step that replaced it.
- The one trainer that holds an epoch makes the epoch's folder before it writes anything; this keeps epochs apart even
  if Redis has lost them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import blake3
import msgpack
import zstandard

from shared import codec
from shared.errors import DecodeError, Fenced
from shared.files.reading import open_file
from shared.files.storage import fsync, storage
from shared.types import WeightVersion

SCHEMA = 1
_LEVEL = 1
_SMALL = 2**16
_PORTION = 2**20
_SIP = 2**6  # bytes of a frame decompressed at once: 4 may become 128 kB
_MAX_WINDOW = 2**23
_MOST_GROUPS = 2**20
MAX_GROUP_BYTES = 2**28
"""Largest group, in bytes, that reader and trainer accept: a damaged or hostile file costs little memory."""

type Spend = Callable[[int], None]


def _freely(n_bytes: int) -> None:
    pass


_NAME = re.compile(r"e(\d{6,})/s(\d{6,})\.zst\Z")
_REFUSED = re.compile(r"e(\d{6,})/s(\d{6,})-(\d+)\.zst\Z")
_EPOCH = re.compile(r"e(\d{6,})\Z")


class Archive:
    """Write the archive of one run.

    Args:
        root: the archive's folder; `claim` creates it.
        run: name of the run, stored in every file.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.root, self._run = root, run

    def claim(self, epoch: int) -> bool:
        """Create the epoch's folder; return False if it exists, because another trainer then has the epoch.

        Partial files that a crash left in older epochs are removed. Raises StorageFull.
        """
        with storage(self.root.parent):
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                _folder(self.root, epoch).mkdir()
            except FileExistsError:
                return False
            fsync(self.root)
            fsync(self.root.parent)
        for leftover in self.root.glob("e*/.*.tmp"):
            if _epoch(leftover.parent) < epoch:
                leftover.unlink(missing_ok=True)
        return True

    def last_epoch(self) -> int:
        """Return the highest epoch ever claimed; 0 if there is none."""
        return max(epochs(self.root), default=0)

    def check_newest(self, epoch: int) -> None:
        """Raise Fenced if a later epoch was claimed."""
        if self.last_epoch() > epoch:
            raise Fenced("another trainer of the run has started")

    def write(self, version: WeightVersion, payloads: Sequence[bytes]) -> list[str]:
        """Make the groups of `version` durable, in training order; return their digests.

        The epoch has to be claimed. Raises StorageFull; then no file is left.
        """
        path = path_of(self.root, version)
        temporary, digests = path.with_name(f".{path.name}.tmp"), [digest(payload) for payload in payloads]
        with storage(path.parent):
            try:
                self._compress(temporary, version, payloads, digests)
                temporary.rename(path)
                fsync(path.parent)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        return digests

    def read(self, version: WeightVersion) -> Iterator[bytes]:
        """See `read` below."""
        return read(self.root, self._run, version)

    def _compress(self, path: Path, version: WeightVersion, payloads: Sequence[bytes], digests: Sequence[str]) -> None:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        header = {"schema": SCHEMA, "run": self._run, "version": str(version), "n": len(payloads), "digests": digests}
        with path.open("wb") as file:
            for value in (header, *payloads):
                file.write(compressor.compress(codec.pack(value)))
            file.flush()
            os.fsync(file.fileno())


def digest(payload: bytes) -> str:
    """Return the blake3 of a group's wire bytes, in hex."""
    return blake3.blake3(payload).hexdigest()


def path_of(root: Path, version: WeightVersion) -> Path:
    return _folder(root, version.epoch) / f"s{version.step:06d}.zst"


def epochs(root: Path) -> set[int]:
    """Return the epochs that were ever claimed."""
    return set(map(_epoch, root.glob("e*"))) - {0}


def versions(root: Path) -> list[WeightVersion]:
    """Return the versions that have a file, oldest first; none if `root` is missing."""
    matches = map(_NAME.match, names(root))
    return sorted(WeightVersion(int(m[1]), int(m[2])) for m in matches if m)


def names(root: Path, end: str = "") -> Iterator[str]:
    """Yield the files in the epochs' folders whose names end so, as `e000001/s000042.zst`; none if `root` is missing.

    A folder may hold a hundred thousand files, so it creates no path objects.
    """
    for folder in _entries(root):
        if _EPOCH.match(folder):
            yield from (f"{folder}/{name}" for name in _entries(root / folder) if name.endswith(end))


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def refused(root: Path) -> list[tuple[WeightVersion, Path]]:
    """Return the refused groups' files below `root`, with the version they would have made; oldest first."""
    matches = map(_REFUSED.match, names(root))
    found = sorted((int(m[1]), int(m[2]), int(m[3]), root / m.string) for m in matches if m)
    return [(WeightVersion(epoch, step), path) for epoch, step, _, path in found]


def refused_path(root: Path, version: WeightVersion, n: int) -> Path:
    """Return the path for the n-th refusal (1 is the first) of a version."""
    return _folder(root, version.epoch) / f"s{version.step:06d}-{n}.zst"


def read(root: Path, run: str, version: WeightVersion, spend: Spend = _freely) -> Iterator[bytes]:
    """Yield the wire bytes of the groups that made `version`, in training order. Raises DecodeError."""
    return read_file(path_of(root, version), run, version, spend)


def read_file(path: Path, run: str, version: WeightVersion, spend: Spend = _freely) -> Iterator[bytes]:
    """Yield the wire bytes of the groups in a file, in training order.

    Raises DecodeError if the file is missing, damaged, or belongs to another run or version.

    Args:
        spend: called with the number of bytes just unpacked, before unpacking more; may raise DecodeError.
    """
    try:
        with open_file(path) as file:
            yield from _payloads(path, _values(file, spend), run, version)
    except OSError as error:
        raise DecodeError(f"archive {path}: {error.strerror}") from error
    except (zstandard.ZstdError, msgpack.UnpackException, ValueError) as error:
        raise DecodeError(f"archive {path} is damaged: {type(error).__name__}: {error}") from error


def _folder(root: Path, epoch: int) -> Path:
    return root / f"e{epoch:06d}"


def _epoch(folder: Path) -> int:
    """Return 0 for a folder that is not an epoch's."""
    name = _EPOCH.match(folder.name)
    return int(name[1]) if name else 0


def _values(file: IO[bytes], spend: Spend) -> Iterator[bytes]:
    """Yield the contents of the frames. Raises ValueError if the last one is cut off, or one is too large."""
    read = memoryview(b"")
    while read or (read := memoryview(file.read(_PORTION))):
        frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        parts, size = list[bytes](), 0
        while not frame.eof:
            if not read and not (read := memoryview(file.read(_PORTION))):
                raise ValueError("the last frame is cut off")
            part = frame.decompress(read[:_SIP])
            used, read = read[:_SIP], read[_SIP:]
            size += len(part)
            spend(len(part))
            if size > MAX_GROUP_BYTES + _SMALL:
                raise ValueError(f"a frame holds more than {MAX_GROUP_BYTES} bytes")
            parts.append(part)
            if frame.eof and frame.unused_data:
                read = memoryview(bytes(used[len(used) - len(frame.unused_data) :]) + bytes(read))
        del frame
        yield b"".join(parts)


def _payloads(path: Path, values: Iterator[bytes], run: str, version: WeightVersion) -> Iterator[bytes]:
    header = _unpacked(path, next(values, b""), _MOST_GROUPS)
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise DecodeError(f"archive {path} is not of schema {SCHEMA}")
    if (header.get("run"), header.get("version")) != (run, str(version)):
        found = f"run {str(header.get('run'))[:100]}, version {str(header.get('version'))[:100]}"
        raise DecodeError(f"archive {path} belongs to {found}, not to {run}, {version}")
    expected, n = header.get("n"), 0
    digests = header.get("digests")
    if type(expected) is not int or not isinstance(digests, list | None):
        raise DecodeError(f"archive {path} has no valid header")
    for value in values:
        group = _unpacked(path, value, 1)
        if not isinstance(group, bytes):
            raise DecodeError(f"archive {path} holds something other than groups")
        del value
        n += 1
        if n > expected:
            break
        if digests is not None and digest(group) not in digests[n - 1 : n]:
            raise DecodeError(f"archive {path}: group {n} does not have its recorded digest")
        yield group
    if n != expected:
        raise DecodeError(
            f"archive {path} holds {f'more than {expected}' if n > expected else n} groups, its header says {expected}"
        )


def _unpacked(path: Path, value: bytes, most: int) -> Any:
    try:
        return codec.unpack(value, "a frame", most)
    except DecodeError as error:
        raise DecodeError(f"archive {path} is damaged: {error.detail}") from error
