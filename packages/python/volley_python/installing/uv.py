"""Find and run uv, which installs packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from shared.errors import Unavailable

_MAX_DETAIL = 300
INDEX = "check that the package index is reachable; UV_INDEX_URL names one other than PyPI"


def find_uv() -> Path:
    """Return the path of uv. Raises Unavailable."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise Unavailable("uv, which installs packages, is not installed", "install the package uv beside this Python")
    return Path(found)


def run_uv(*arguments: str, wanted: str, timeout_s: float, hint: str = INDEX) -> None:
    """Run `uv ARGUMENTS` to install what `wanted` names. Raises Unavailable with uv's last line."""
    try:
        done = subprocess.run(
            [str(find_uv()), *arguments, "--quiet"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{wanted} was not installed within {timeout_s:g} s", hint) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["uv did not say why"])[-1].strip()[:_MAX_DETAIL]
        raise Unavailable(f"{wanted} could not be installed: {reason}", hint)
