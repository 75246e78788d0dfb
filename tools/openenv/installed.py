"""Virtual environment with OpenEnv's package."""

from __future__ import annotations

from pathlib import Path

from tools.installed import python_with

PACKAGE = "openenv==0.10.0"
VARIABLE = "VOLLEY_OPENENV_PYTHON"


def openenv_python() -> Path:
    """Interpreter with OpenEnv's package. Raises Unavailable if it cannot be installed."""
    return python_with(PACKAGE, VARIABLE)
