"""Temporary run folders of commands."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import VolleyError
from shared.run.folder import RunFolder


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for one run, and remove it at the end.

    If the body raises a VolleyError, the run's logs stay, because the error names them. Raises OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
    has_failed = False
    try:
        yield folder
    except VolleyError:
        has_failed = True
        raise
    finally:
        logs = [path for run in folder.iterdir() for path in RunFolder(run).logs.glob("*") if path.stat().st_size]
        if has_failed and logs:
            _remove_all_but_logs(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_all_but_logs(folder: Path) -> None:
    for path in folder.glob("*/*"):
        if path == RunFolder(path.parent).logs:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
