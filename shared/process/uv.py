"""Where uv is, which installs packages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shared.errors import Unavailable


def find_uv() -> Path:
    """Raises Unavailable."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise Unavailable("uv is not installed, which installs packages", "install the package uv beside this Python")
    return Path(found)
