"""Paths of the project: virtual environments, caches."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import ConfigError
from volley import bootstrap, wheel

PROJECT = wheel.project()
CACHE = PROJECT / ".cache"


def python_of(environment: str) -> Path:
    """Interpreter of a virtual environment: base, rollout or trainer.

    VOLLEY_VENVS replaces the project's `.venvs`. An installed wheel makes the environment if it is not there; a clone
    does not. Raises ConfigError.
    """
    root = os.environ.get("VOLLEY_VENVS")
    if not root and wheel.is_managed():
        try:
            bootstrap.prepare(PROJECT, [environment])
        except bootstrap.InstallError as error:
            raise ConfigError(str(error)) from error
    python = Path(root or PROJECT / ".venvs") / environment / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ConfigError(f"the virtual environment {python.parents[1]} is missing", "install it with `make install`")
    return python


def is_unmade(environment: str) -> bool:
    """True for an environment of an installed wheel that no command has needed yet."""
    return not os.environ.get("VOLLEY_VENVS") and wheel.is_managed() and not bootstrap.is_current(PROJECT, environment)


def installing(device: str = "") -> str:
    """Return what installs an environment again, for a device, as the hint of an error."""
    if not wheel.is_managed():
        return f"VOLLEY_ACCELERATOR={device} make install" if device else "make install"
    return (
        f"set VOLLEY_ACCELERATOR={device}"
        if device
        else f"remove {PROJECT / '.venvs'}; the next command makes it again"
    )


def variables_of(environment: str, *, cpu: bool) -> dict[str, str]:
    """Environment variables of a program: the caller's, plus JAX's compilation cache in the project's folder.

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
