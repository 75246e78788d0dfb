"""Virtual environments for packages with many dependencies: one per package, made when first needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.errors import Unavailable
from volley.bootstrap import ROOT, find_uv, locked, uv_environment

_TIMEOUT_S = 600.0


def python_with(package: str, variable: str, *also: str) -> Path:
    """Interpreter named in `$variable`, else that of an environment in `.cache`.

    Args:
        package: requirement, NAME==VERSION.
        also: requirements that the package does not declare.

    Raises Unavailable if the package cannot be installed.
    """
    if given := os.environ.get(variable):
        return Path(given)
    folder = ROOT / ".cache" / re.sub(r"[^\w.]+", "-", package)
    python, done = folder / "bin" / "python", folder / "installed"
    with locked(folder.with_suffix(".lock")):
        if not done.exists():
            _install(package, variable, folder, python, also)
            done.touch()
    return python


def _install(package: str, variable: str, folder: Path, python: Path, also: Sequence[str]) -> None:
    uv = find_uv(ROOT)
    if uv is None:
        raise Unavailable(f"there is no uv to install {package}", f"run `make install`, or set {variable}")
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder],
        [uv, "pip", "install", "--quiet", "--python", python, package, *also],
    ):
        try:
            done = subprocess.run(
                command,
                env=uv_environment(ROOT),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{package} was not installed within {_TIMEOUT_S:g} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["uv said nothing"]
            raise Unavailable(f"{package} cannot be installed: {lines[-1]}", f"set {variable} to a Python with it")
