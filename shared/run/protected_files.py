"""Digests of a run's files that only commit records protect: by name, length and digest.

The files only grow, and fork.json stays as it is, so each record describes a prefix of the later file. A trainer that
finds a file shorter than its last record says (it was removed, or restored from an older copy) counts that loss in the
next record; a shorter file without such a count is treated as forged. A starting trainer also counts the files whose
recorded
prefix was rewritten: older records may be gone later, but the count stays. The ledger and the metrics are in the chain
instead (see shared.run.chain).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3

from shared.files.reading import MAX_RECORD_BYTES, open_file
from shared.run.folder import RunFolder

type ProtectedFiles = Mapping[str, tuple[int, str]]
"""By name: number of bytes up to the end of a line, and their blake3 in hex."""
_BLOCK_BYTES = 2**20
_MOST_NAME, _DIGITS = 100, 64


def files(run: RunFolder) -> tuple[Path, ...]:
    """Return the files to protect; no trainer removes a line of them."""
    return (run.evals, run.samples, run.mixture, run.refused, run.demonstrations, run.saved, run.fork)


def parse(raw: Any) -> ProtectedFiles:
    """Parse protected files. Raises TypeError or ValueError."""
    found = dict[str, tuple[int, str]]()
    for name, (size, digest) in dict(raw).items():
        if type(size) is not int or not 0 <= size <= MAX_RECORD_BYTES or len(name) > _MOST_NAME:
            raise TypeError("a protected file has no valid size")
        if not isinstance(digest, str) or len(digest) != _DIGITS:
            raise TypeError("a protected file has no valid digest")
        found[str(name)] = size, digest
    return found


type Losses = Mapping[str, int]
"""By name: how often a trainer found that a file had lost lines; by `REWRITTEN` and the name: that its recorded prefix
had changed.
"""
REWRITTEN = "rewritten "


def parse_losses(raw: Any) -> Losses:
    """Parse losses. Raises TypeError or ValueError."""
    found = dict(raw)
    if any(len(name) > _MOST_NAME or type(n) is not int or not 0 < n <= MAX_RECORD_BYTES for name, n in found.items()):
        raise TypeError("losses are not counts by name")
    return found


def losses(before: ProtectedFiles, now: ProtectedFiles, known: Losses, rewritten: Collection[str] = ()) -> Losses:
    """Count the files that are now shorter than before, and those `rewritten`, in addition to those in `known`."""
    shorter = [name for name, (size, _) in before.items() if now.get(name, (0, ""))[0] < size]
    found = Counter(known)
    found.update([*shorter, *(REWRITTEN + name for name in rewritten)])
    return dict(found)


@dataclass(slots=True)
class _HashedPrefix:
    """The first `size` bytes of the file `inode` have been read into `hasher`."""

    inode: int
    size: int = 0
    hasher: blake3.blake3 = field(default_factory=blake3.blake3)


class FollowedFiles:
    """Files of one run, each byte read once. All methods block; use one thread at a time."""

    def __init__(self, run: RunFolder) -> None:
        self._paths = files(run)
        self._at = dict[str, _HashedPrefix]()

    def now(self) -> ProtectedFiles:
        """Return length and digest of each file; files that are missing or unreadable now are left out."""
        found = dict[str, tuple[int, str]]()
        for path in self._paths:
            try:
                at = self._followed(path)
            except OSError:
                continue
            if at.size:
                found[path.name] = at.size, at.hasher.hexdigest()
        return found

    def _followed(self, path: Path) -> _HashedPrefix:
        with open_file(path) as file:
            there = os.fstat(file.fileno())
            at = self._at.get(path.name)
            if at is None or at.inode != there.st_ino or at.size > there.st_size:
                at = self._at[path.name] = _HashedPrefix(there.st_ino)
            file.seek(at.size)
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                whole, end, rest = (rest + block).rpartition(b"\n")
                at.hasher.update(whole + end)
                at.size += len(whole + end)
            return at


def at_start(run: RunFolder, before: ProtectedFiles) -> tuple[ProtectedFiles, tuple[str, ...]]:
    """Return the files at a trainer's start, and those whose recorded prefix has changed. Blocks."""
    now = FollowedFiles(run).now()
    changed = list[str]()
    for path in files(run):
        size, digest = before.get(path.name, (0, ""))
        if 0 < size <= now.get(path.name, (0, ""))[0]:
            with suppress(OSError):
                if _prefix_digest(path, size) != digest:
                    changed.append(path.name)
    return now, tuple(changed)


def _prefix_digest(path: Path, size: int) -> str:
    """Return the digest of the first `size` bytes. Raises OSError."""
    hasher = blake3.blake3()
    with open_file(path) as file:
        while size and (block := file.read(min(_BLOCK_BYTES, size))):
            hasher.update(block)
            size -= len(block)
    return hasher.hexdigest()
