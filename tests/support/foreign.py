"""Virtual environments of packages that Volley does not depend on, for tests beside the real package.

An environment is made once under `.cache/foreign/`, whichever test asks first, and used by all that name the same
requirements. A test whose environment cannot be made is skipped with the reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from volley_python.installing.uv import find_uv

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "foreign"
INSTALL_S = 600.0
SHOWN = 600
"""Characters of the installer's output that a skipped test gives as its reason."""
TORCH = ("torch==2.13.0", "transformers==5.24.0", "peft==0.21.2")
"""Requirements of the references of models, adapters and optimizers."""


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with these requirements. Skips the test if it cannot be made.

    With torch among the requirements the machine's `python3` and pip install it, because pip takes a CPU wheel from
    the machine's own folders of packages; otherwise uv does, for this test's Python. Local folders are requirements
    too; a change of their files is not noticed.
    """
    asked = "\n".join((sys.version, *requirements))
    folder = FOLDER / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    complete, python = folder / "complete", folder / "bin" / "python"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            for command in _commands(folder, requirements):
                _run(name, command)
            complete.touch()
    return python


def torch() -> Path:
    """Return the Python that has torch, transformers and PEFT. Skips the test if it cannot be made."""
    return environment("torch", TORCH)


def _commands(folder: Path, requirements: Sequence[str]) -> Sequence[Sequence[str]]:
    python = str(folder / "bin" / "python")
    if any(one.startswith("torch") for one in requirements):
        machine = shutil.which("python3") or sys.executable
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements]  # most is never imported
        return [machine, "-m", "venv", str(folder)], install
    uv = str(find_uv())
    install = [uv, "pip", "install", "--quiet", "--python", python, *requirements]
    return [uv, "venv", "--quiet", "--python", sys.executable, str(folder)], install


def _run(name: str, command: Sequence[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the environment of {name} was not installed in {INSTALL_S:g} s")
    if ended.returncode:
        pytest.skip(f"the environment of {name} cannot be installed: {ended.stderr.strip()[-SHOWN:]}")
