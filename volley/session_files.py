"""Files of a run's folder that its services read at startup.

Before a restart the supervisor rewrites those that are missing or changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.files.reading import read_file


@dataclass(frozen=True, slots=True)
class _KeptFile:
    content: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """Files at the start of a session, and folders that must exist, with their modes.

    All are below `root`, which is never recreated: a run whose whole folder is gone must not start over.
    """

    root: Path
    files: dict[Path, _KeptFile]
    folders: dict[Path, int]

    @classmethod
    def read(cls, root: Path, files: Iterable[Path], folders: Iterable[Path]) -> Self:
        """Read the files that exist. Raises OSError."""
        kept = {
            path: _KeptFile(path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in files if path.is_file()
        }
        return cls(root, kept, {path: stat.S_IMODE(path.stat().st_mode) for path in folders if path.is_dir()})

    def restore(self) -> None:
        """Rewrite missing and changed files. If a path cannot be written, the service reports it when it starts."""
        if not self.root.is_dir():
            return
        for folder, mode in self.folders.items():
            with contextlib.suppress(OSError):
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
        for path, kept in self.files.items():
            with contextlib.suppress(OSError):
                if not _holds(path, kept.content):
                    write_private(path, kept.content, kept.mode)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_file(path, len(content)) == content
    except OSError:
        return False


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace the file atomically by one that has `mode` from its creation. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
