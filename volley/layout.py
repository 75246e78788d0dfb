"""Paths of the project: virtual environments, caches and environment templates."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
CACHE = PROJECT / ".cache"
_ENV = PROJECT / "services" / "env"
TEMPLATES = {
    "agent": _ENV / "submissions" / "templates" / "agent.py",
    "sums": _ENV / "submissions" / "templates" / "sums.py",
    "textarena": _ENV / "submissions" / "templates" / "textarena.py",
    "verifiers": _ENV / "bridges" / "verifiers_server.py",
}
"""Files that `volley env init` copies: environments, an agent, and a server for environments of `verifiers`."""


def python_of(environment: str) -> Path:
    """Interpreter of a virtual environment: base, rollout or trainer.

    VOLLEY_VENVS replaces the project's `.venvs`. Raises ConfigError if the environment is not installed.
    """
    root = Path(os.environ.get("VOLLEY_VENVS") or PROJECT / ".venvs")
    python = root / environment / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ConfigError(f"the virtual environment {root / environment} is missing", "install it with `make install`")
    return python


def variables_of(environment: str, *, cpu: bool) -> dict[str, str]:
    """Environment variables of a program: the caller's, plus JAX's compilation cache in the project.

    With `cpu`, JAX uses the CPU and ignores the caller's JAX_PLATFORMS. The cache also keeps programs that compile in
    less than a second, which JAX skips by default: they take a sixth of a start.

    PYTHONDONTWRITEBYTECODE is removed: without bytecode files a service compiles every imported module at every start.
    """
    added = {
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / f"jax-{environment}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**added, **kept, **({"JAX_PLATFORMS": "cpu"} if cpu else {})}
