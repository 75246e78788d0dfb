"""Payloads that leave a trace if anybody unpickles them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np


class Payload:
    """Runs a command while it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def infect(folder: Path, canary: Path, keep: tuple[str, ...] = ()) -> None:
    """Puts a payload in the place of every file below `folder` (but those named in `keep`), and beside them as .npy and
    .pkl.
    """
    pickled = pickle.dumps(Payload(canary))
    for path in [path for path in folder.rglob("*") if path.is_file() and path.name not in keep]:
        path.write_bytes(pickled)
    for name in ("x.pkl", "pytorch_model.bin"):
        (folder / name).write_bytes(pickled)
    np.save(folder / "object.npy", np.array([Payload(canary)], object), allow_pickle=True)


def works(folder: Path) -> bool:
    """Whether the payload would leave its trace: a test that finds none then means something."""
    canary = folder / "proof"
    pickle.loads(pickle.dumps(Payload(canary)))
    return canary.exists()
