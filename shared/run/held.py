"""The files of lines that nothing else leads to, as a commit record holds them: by name, how long each was, and the
digest of that.

The files only grow, so each record holds the beginning of the file as it is later. A trainer that finds one
shorter than its last record holds it (somebody has removed it, or restored an older copy) counts that in the next
record: without such a count, shorter files are a lie. One that starts counts as well which of them begin otherwise
(somebody has rewritten them): records of before that may be gone later, the count stays. The ledger and the metrics
have the chain instead (see shared.run.chain).
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

type HeldFiles = Mapping[str, tuple[int, str]]
"""By name: bytes up to the end of a line, and their blake3 in hex."""
_BLOCK_BYTES = 2**20
_MOST_NAME, _DIGITS = 100, 64


def files(run: RunFolder) -> tuple[Path, ...]:
    """Files that are held: no trainer removes a line of them."""
    return (run.evals, run.samples, run.mixture, run.refused, run.demonstrations, run.saved)


def parse(raw: Any) -> HeldFiles | None:
    """Raises TypeError or ValueError."""
    if raw is None:
        return None
    found = dict[str, tuple[int, str]]()
    for name, (size, digest) in dict(raw).items():
        if type(size) is not int or not 0 <= size <= MAX_RECORD_BYTES or len(name) > _MOST_NAME:
            raise TypeError("a file that is held has no size")
        if not isinstance(digest, str) or len(digest) != _DIGITS:
            raise TypeError("a file that is held has no digest")
        found[str(name)] = size, digest
    return found


type Losses = Mapping[str, int]
"""By name: how often a trainer has found that a file of the run had lost lines; by `REWRITTEN` and the name, that it
began otherwise.
"""
REWRITTEN = "rewritten "


def parse_losses(raw: Any) -> Losses | None:
    """Raises TypeError or ValueError."""
    if raw is None:
        return None
    found = dict(raw)
    if any(len(name) > _MOST_NAME or type(n) is not int or not 0 < n <= MAX_RECORD_BYTES for name, n in found.items()):
        raise TypeError("losses are no counts by name")
    return found


def losses(before: HeldFiles | None, now: HeldFiles, known: Losses | None, rewritten: Collection[str] = ()) -> Losses:
    """Count the files that are shorter now than before and those `rewritten`, beside those that are `known`."""
    shorter = [name for name, (size, _) in (before or {}).items() if now.get(name, (0, ""))[0] < size]
    found = Counter(known or {})
    found.update([*shorter, *(REWRITTEN + name for name in rewritten)])
    return dict(found)


@dataclass(slots=True)
class _Followed:
    """`size` bytes of the file that is `inode` have been read."""

    inode: int
    size: int = 0
    told: blake3.blake3 = field(default_factory=blake3.blake3)


class FollowedFiles:
    """The files of one run, each byte read once. All methods block; one thread at a time."""

    def __init__(self, run: RunFolder) -> None:
        self._paths = files(run)
        self._at = dict[str, _Followed]()

    def now(self) -> HeldFiles:
        """Length and digest of each file; one that is not there, or cannot be read now, is left out."""
        found = dict[str, tuple[int, str]]()
        for path in self._paths:
            try:
                at = self._followed(path)
            except OSError:
                continue
            if at.size:
                found[path.name] = at.size, at.told.hexdigest()
        return found

    def _followed(self, path: Path) -> _Followed:
        with open_file(path) as file:
            there = os.fstat(file.fileno())
            at = self._at.get(path.name)
            if at is None or at.inode != there.st_ino or at.size > there.st_size:
                at = self._at[path.name] = _Followed(there.st_ino)
            file.seek(at.size)
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                whole, end, rest = (rest + block).rpartition(b"\n")
                at.told.update(whole + end)
                at.size += len(whole + end)
            return at


def at_start(run: RunFolder, before: HeldFiles | None) -> tuple[HeldFiles, tuple[str, ...]]:
    """The files as a trainer finds them, and which of them are no shorter than before but begin otherwise. Blocks."""
    now = FollowedFiles(run).now()
    changed = list[str]()
    for path in files(run):
        size, digest = (before or {}).get(path.name, (0, ""))
        if 0 < size <= now.get(path.name, (0, ""))[0]:
            with suppress(OSError):
                if _beginning(path, size) != digest:
                    changed.append(path.name)
    return now, tuple(changed)


def _beginning(path: Path, size: int) -> str:
    """Digest of the first `size` bytes. Raises OSError."""
    told = blake3.blake3()
    with open_file(path) as file:
        while size and (block := file.read(min(_BLOCK_BYTES, size))):
            told.update(block)
            size -= len(block)
    return told.hexdigest()
