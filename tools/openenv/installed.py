"""A Python that has OpenEnv's package. A hundred others come with it, so it gets a virtual environment of its own, made
when it is first needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shared.errors import Unavailable
from tools.bootstrap import ROOT, find_uv, locked, uv_environment

PACKAGE = "openenv==0.10.0"
VARIABLE = "VOLLEY_OPENENV_PYTHON"
_TIMEOUT_S = 600.0


def openenv_python() -> Path:
    """That of $VOLLEY_OPENENV_PYTHON, else of `.cache/openenv`. Raises Unavailable where it cannot be installed."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    folder = ROOT / ".cache" / PACKAGE.replace("==", "-")
    python, done = folder / "bin" / "python", folder / "installed"
    with locked(folder.with_suffix(".lock")):
        if not done.exists():
            _install(folder, python)
            done.touch()
    return python


def _install(folder: Path, python: Path) -> None:
    uv = find_uv(ROOT)
    if uv is None:
        raise Unavailable("there is no uv to install OpenEnv with", f"make install, or set {VARIABLE}")
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder],
        [uv, "pip", "install", "--quiet", "--python", python, PACKAGE],
    ):
        try:
            done = subprocess.run(
                command, env=uv_environment(ROOT), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{PACKAGE} was not installed within {_TIMEOUT_S:g} s") from None
        if done.returncode:
            told = done.stderr.strip().splitlines() or ["uv said nothing"]
            raise Unavailable(f"{PACKAGE} cannot be installed: {told[-1]}", f"{VARIABLE} names a Python that has it")
