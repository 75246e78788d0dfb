"""End of a failed run's logs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from shared.run.folder import RunFolder

_TAIL_BYTES, _TAIL_LINES = 16_384, 30


def log_end(folder: RunFolder) -> dict[str, Any] | None:
    """Return `{"name", "lines"}` of the log that was written last; None if there is none that can be read."""
    with suppress(OSError):
        logs = [path for path in folder.logs.glob("*.log") if path.is_file() and not path.is_symlink()]
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return None
        with newest.open("rb") as file:
            file.seek(max(0, newest.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
        return {"name": newest.name, "lines": lines[-_TAIL_LINES:]}
    return None
