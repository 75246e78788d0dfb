"""Python environments of the trackers, one for each, made at first use in the project's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.process.uv import INDEX, run_uv
from volley.layout import CACHE

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboardx>=2.6,<3",),
    "wandb": ("wandb>=0.22,<1",),
    "trackio": ("trackio>=0.20,<1", "pandas>=2.2"),
    "mlflow": ("mlflow-skinny>=3.5,<4",),
}
_INSTALL_S = 900
_HINT = f"{INDEX}; or name a Python that has the tracker: VOLLEY_TRACKER_PYTHON=PATH"


def python_of(tracker: str) -> Path:
    """Return the interpreter of a tracker's environment, and make it if it is missing.

    VOLLEY_TRACKER_PYTHON names an interpreter to use instead. Raises Unavailable.
    """
    given = os.environ.get("VOLLEY_TRACKER_PYTHON")
    if given:
        return Path(given)
    wanted = REQUIREMENTS[tracker]
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:16]
    folder = CACHE / "trackers" / f"{tracker}-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{tracker}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            _make(tracker, folder, wanted)
    return python


def _make(tracker: str, folder: Path, wanted: tuple[str, ...]) -> None:
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    for arguments in (
        ("venv", "--python", sys.executable, "--relocatable", str(draft)),
        ("pip", "install", "--python", str(draft / "bin" / "python"), *wanted),
    ):
        run_uv(*arguments, wanted=f"tracker {tracker}", timeout_s=_INSTALL_S, hint=_HINT)
    shutil.rmtree(folder, ignore_errors=True)  # its interpreter is gone
    draft.rename(folder)
