"""Find uv, which installs packages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shared.errors import Unavailable


def find_uv() -> Path:
    """Return the path of uv. Raises Unavailable."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise Unavailable("uv, which installs packages, is not installed", "install the package uv beside this Python")
    return Path(found)
