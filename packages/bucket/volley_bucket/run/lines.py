"""Upload of a run's files of lines, in pieces.

Invariants: only whole lines that are durable in the folder are uploaded. If an append-only file in the folder has less
than the bucket has of it, neither is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import blake3

from shared.errors import ConfigError
from shared.run import ledger
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED
from shared.types import WeightVersion
from volley_bucket.run.head import MAX_PIECE_BYTES, Piece, files_of_lines

_RATIO = 8
type Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Followed:
    """Part of a file that is in the bucket."""

    pieces: Pieces = ()

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def merged(self, n_new: int) -> _Followed:
        """Drop the last pieces, which are uploaded again with `n_new` bytes as one.

        The first dropped piece is no larger than an eighth of the bytes after it. A file that grows by n equal pieces
        then has about 8 log9(n) pieces, and each byte is uploaded about log9(n) times (size-tiered compaction, as in
        Cassandra).
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
    """Files of lines that are copied to the bucket. Every method blocks, and raises OSError.

    Args:
        upload: uploads a piece.
    """

    def __init__(self, folder: RunFolder, upload: Callable[[Piece, bytes], None]) -> None:
        self._folder, self._upload = folder, upload
        self._at, self._absent = dict[str, _Followed](), frozenset[str]()

    def look(self) -> None:
        """Note which files are missing, before any is repaired or created."""
        self._absent = frozenset(name for name, path in files_of_lines(self._folder).items() if not path.exists())

    def begin(self, named: Mapping[str, Pieces], address: str) -> None:
        """Continue from the pieces that a head names. Raises ConfigError if the folder has lost some of them."""
        folder, at = self._folder, dict[str, _Followed]()
        added = {path.name for path in (folder.ledger, folder.refused, *folder.handed_over.values())}
        for name, pieces in named.items():
            same = _same(folder.path / name, pieces)
            if name in self._absent or (name in added and len(same) < len(pieces)):
                raise ConfigError(
                    f"{folder.path / name} has lost lines that {address} has",
                    "put the file back; or, to resume from the bucket, move this folder away: an empty one is restored",
                )
            at[name] = _Followed(same)
        self._at = at

    def forget(self) -> None:
        """Upload every file again, from its start."""
        self._at = {}

    def size(self, path: Path) -> int:
        """Bytes of a file that the bucket has."""
        return self._at.get(path.name, _Followed()).size

    def put(self, version: WeightVersion, epoch: int) -> dict[str, Pieces]:
        """Upload new lines, and return all pieces; of the ledger, no line of a step after `version`."""
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
    """Return the leading pieces that the file still begins with."""
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
    """True if the first `size` bytes end with a line."""
    file.seek(max(0, size - 1))
    return size == 0 or file.read(1) == b"\n"


def _until(data: bytes, version: WeightVersion) -> bytes:
    """Cut a ledger's lines before the first trained ticket of a later step of the same epoch, or of a later epoch."""
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
