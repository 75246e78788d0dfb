"""Python environments of packages that conflict with the project's own, made at first use."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from volley_python.installing.uv import INDEX, run_uv

_INSTALL_S = 900


def python_with(name: str, requirements: Sequence[str], cache: Path, hint: str = INDEX) -> Path:
    """Return the interpreter of an environment with these requirements, and make it if it is missing. Blocks.

    Args:
        cache: folder that keeps such environments.

    Raises Unavailable with `hint`.
    """
    digest = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{digest}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            _make(name, folder, requirements, hint)
    return python


def _make(name: str, folder: Path, requirements: Sequence[str], hint: str) -> None:
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    for arguments in (
        ("venv", "--python", sys.executable, "--relocatable", str(draft)),
        ("pip", "install", "--python", str(draft / "bin" / "python"), *requirements),
    ):
        run_uv(*arguments, wanted=name, timeout_s=_INSTALL_S, hint=hint)
    shutil.rmtree(folder, ignore_errors=True)  # its interpreter is gone
    draft.rename(folder)
