"""Identifier of the run: a run that starts again in an emptied folder has another one.

Invariant: while the folder holds a checkpoint or a commit record, it stays, even if `published/` is removed.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from shared.files import storage
from shared.run import checkpoint_files, commits
from shared.run.folder import RUN_ID, RunFolder

_NAME = re.compile(r"[0-9a-f]{16}")


def run_id(published: Path) -> str:
    """Read the identifier, or a copy of it, or draw one. Blocks. Raises StorageFull, StorageDenied.

    Args:
        published: folder of the run's chunks, directly below the run's folder.
    """
    folder = RunFolder(published.parent)
    first, copy = published / RUN_ID, folder.run_id
    with storage.storage(folder.path):
        found = _read(first)
        if found is None and (checkpoint_files.versions(folder.checkpoints) or commits.versions(folder.archive)):
            found = _read(copy) or _read(folder.recorded_run_id)
        name = found or secrets.token_hex(8)
        for path in (first, copy):
            if _read(path) != name:
                path.parent.mkdir(parents=True, exist_ok=True)
                storage.replace(path, name.encode())
    return name


def _read(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if _NAME.fullmatch(text) else None
