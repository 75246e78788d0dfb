"""`bucket.json` of a run's folder: the folder's name in its bucket."""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import orjson

from shared import codec
from shared.errors import DecodeError
from shared.files import storage
from shared.files.reading import read_file

_ID = re.compile(r"[0-9a-f]{16}")
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """Name and history of a run's folder.

    `restored` is the version that the folder was restored at from the bucket, None if it never was; `owns` are the
    addresses of its buckets, even if they have lost their heads since.
    """

    folder: str
    restored: str | None = None
    owns: tuple[str, ...] = ()

    @classmethod
    def draw(cls, restored: str | None = None) -> Self:
        return cls(secrets.token_hex(8), restored)

    def owning(self, address: str) -> Self:
        return self if address in self.owns else replace(self, owns=(*self.owns, address))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the identity; None if the file is missing or damaged. Raises OSError."""
        try:
            raw = codec.from_json(read_file(path, _MAX_BYTES), path.name)
            found = cls(raw["folder"], raw["restored"], tuple(raw["owns"]))
            return found if _ID.fullmatch(found.folder) else None
        except (FileNotFoundError, DecodeError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the identity durably. Raises StorageFull."""
        storage.replace(path, orjson.dumps(asdict(self)))
