"""The files of lines of a run's folder, which the bucket has in pieces.

Invariants: whole lines are put, once they are durable in the folder; a file that is only ever added to never has less
here than the bucket has of it, else neither of them is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import blake3

from services.trainer.bucket.head import MAX_PIECE_BYTES, Piece, files_of_lines
from shared.errors import ConfigError
from shared.run import ledger
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED
from shared.types import WeightVersion

_RATIO = 8
type Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Followed:
    """So much of a file is in the bucket."""

    pieces: Pieces = ()

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def merged(self, n_new: int) -> _Followed:
        """Without the pieces at the end that are put again, with `n_new` bytes, as one: from the first that has no more
        than an eighth of what is behind it. Of a file that grows by n equal pieces so few stay, 8 log9(n), and each
        byte is put about log9(n) times (size-tiered compaction, as in Cassandra).
        """
        behind, kept = n_new, len(self.pieces)
        for n in reversed(range(len(self.pieces))):
            size = self.pieces[n].size
            if size >= MAX_PIECE_BYTES // 2:
                break
            if _RATIO * size <= behind:
                kept = n
            behind += size
        return _Followed(self.pieces[:kept])


class FollowedLines:
    """Every method blocks, and raises OSError.

    Args:
        upload: puts a piece into the bucket.
    """

    def __init__(self, folder: RunFolder, upload: Callable[[Piece, bytes], None]) -> None:
        self._folder, self._upload = folder, upload
        self._at, self._absent = dict[str, _Followed](), frozenset[str]()

    def look(self) -> None:
        """Sees which files are there before any is repaired, or begun anew."""
        self._absent = frozenset(name for name, path in files_of_lines(self._folder).items() if not path.exists())

    def begin(self, named: Mapping[str, Pieces], address: str) -> None:
        """Goes on from what a head names. Raises ConfigError if that is not here any more."""
        folder, at = self._folder, dict[str, _Followed]()
        added = {path.name for path in (folder.ledger, folder.refused, *folder.handed_over.values())}
        for name, pieces in named.items():
            same = _same(folder.path / name, pieces)
            if name in self._absent or (name in added and len(same) < len(pieces)):
                raise ConfigError(
                    f"{folder.path / name} has lost what {address} has of it",
                    "put the file back; or, to go on from the bucket, move this folder away: an empty one is filled",
                )
            at[name] = _Followed(same)
        self._at = at

    def forget(self) -> None:
        """The bucket has none."""
        self._at = {}

    def size(self, path: Path) -> int:
        """In bytes, what the bucket has of a file."""
        return self._at.get(path.name, _Followed()).size

    def put(self, version: WeightVersion, epoch: int) -> dict[str, Pieces]:
        """What was added to the files, of the ledger no step after `version`."""
        for name, path in files_of_lines(self._folder).items():
            try:
                with path.open("rb") as file:
                    self._put(name, file, version if path == self._folder.ledger else None, epoch)
            except FileNotFoundError:
                self._at.pop(name, None)
        return {name: at.pieces for name, at in self._at.items() if at.pieces}

    def _put(self, name: str, file: IO[bytes], until: WeightVersion | None, epoch: int) -> None:
        at = self._at.get(name, _Followed())
        at = at if _ends_there(file, at.size) else _Followed()
        if (n_new := os.fstat(file.fileno()).st_size - at.size) > 0:
            at = at.merged(n_new)
        while True:
            file.seek(at.size)
            data = file.read(MAX_PIECE_BYTES)
            data = data[: data.rfind(b"\n") + 1]
            if until is not None:
                data = _until(data, until)
            if not data:
                break
            os.fsync(file.fileno())
            piece = Piece(epoch, blake3.blake3(data).hexdigest(), len(data))
            self._upload(piece, data)
            at = _Followed((*at.pieces, piece))
        self._at[name] = at


def _same(path: Path, pieces: Pieces) -> Pieces:
    """Those that a file begins with."""
    n = 0
    try:
        with path.open("rb") as file:
            for piece in pieces:
                if blake3.blake3(file.read(piece.size)).hexdigest() != piece.blake3:
                    break
                n += 1
    except FileNotFoundError:
        pass
    return pieces[:n]


def _ends_there(file: IO[bytes], size: int) -> bool:
    """Whether the first `size` bytes are still whole lines."""
    file.seek(max(0, size - 1))
    return size == 0 or file.read(1) == b"\n"


def _until(data: bytes, version: WeightVersion) -> bytes:
    """The lines of a ledger before the first one of a later step of the same epoch, or of a later epoch."""
    n = 0
    for line in data.splitlines(keepends=True):
        one = ledger.parse(line) or {}
        is_later = one.get("epoch", 0) > version.epoch or (
            one.get("epoch") == version.epoch and one["step"] > version.step
        )
        if one.get("disposition") == TRAINED and is_later:
            break
        n += len(line)
    return data[:n]
