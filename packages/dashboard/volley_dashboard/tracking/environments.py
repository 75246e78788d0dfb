"""Python environments of the trackers, one for each, made at first use in the project's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from volley.layout import CACHE
from volley_python.installing.foreign import python_with
from volley_python.installing.uv import INDEX

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboardx>=2.6,<3",),
    "wandb": ("wandb>=0.22,<1",),
    "trackio": ("trackio>=0.20,<1", "pandas>=2.2"),
    "mlflow": ("mlflow-skinny>=3.5,<4",),
}
_HINT = f"{INDEX}; or name a Python that has the tracker: VOLLEY_TRACKER_PYTHON=PATH"


def python_of(tracker: str) -> Path:
    """Return the interpreter of a tracker's environment, and make it if it is missing.

    VOLLEY_TRACKER_PYTHON names an interpreter to use instead. Raises Unavailable.
    """
    given = os.environ.get("VOLLEY_TRACKER_PYTHON")
    if given:
        return Path(given)
    return python_with(tracker, REQUIREMENTS[tracker], CACHE / "trackers", _HINT)
