"""Python environments of the trackers, one for each, made at first use in the project's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.errors import Unavailable
from shared.process.uv import find_uv
from volley.layout import CACHE

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboardx>=2.6,<3",),
    "wandb": ("wandb>=0.22,<1",),
    "trackio": ("trackio>=0.20,<1", "pandas>=2.2"),
    "mlflow": ("mlflow-skinny>=3.5,<4",),
}
_INSTALL_S = 900


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
    _uv(tracker, "venv", "--python", sys.executable, "--relocatable", str(draft))
    _uv(tracker, "pip", "install", "--python", str(draft / "bin" / "python"), *wanted)
    shutil.rmtree(folder, ignore_errors=True)  # its interpreter is gone
    draft.rename(folder)


def _uv(tracker: str, *arguments: str) -> None:
    """Raises Unavailable."""
    try:
        done = subprocess.run(
            [str(find_uv()), *arguments, "--quiet"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"tracker {tracker} was not installed within {_INSTALL_S} s", "try again later") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["uv did not say why"])[-1].strip()[:300]
        raise Unavailable(
            f"tracker {tracker} could not be installed: {reason}",
            "check that the package index is reachable, or name a Python that has it: VOLLEY_TRACKER_PYTHON=PATH",
        )
