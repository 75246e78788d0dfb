"""Named arrays in an Orbax folder. The one module of the trainer that knows Orbax."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from services.trainer.checkpoints.store import Arrays
from shared.errors import WeightsError

_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'")


class OrbaxArrays:
    """The checkpoints' `ArrayFiles`, in the format that rollout servers load."""

    def write(self, folder: Path, arrays: Arrays) -> None:
        """Not compressed: the files are written once, read soon, and removed."""
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(folder, ocp.args.PyTreeSave(_nest(arrays)))
        except ValueError as error:
            raise _from_tensorstore(error) from error

    def read(self, folder: Path) -> dict[str, np.ndarray]:
        """All leaves in host memory, whatever sharding and JAX wrote them."""
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                tree = _tree_of(checkpointer.metadata(folder))
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                return _flatten(checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=as_numpy)))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(cause := _from_tensorstore(error), OSError):
                raise cause from error
            raise WeightsError(f"{folder} cannot be restored: {str(error).splitlines()[0]}") from error


def _without_late_answers() -> None:
    """When a save fails, Orbax closes its event loop under the arrays that TensorStore still writes; each of them would
    print a traceback that says no more than the error of the save does.
    """
    report = sys.unraisablehook

    def hook(found: sys.UnraisableHookArgs) -> None:
        late = (
            found.object is None
            and isinstance(found.exc_value, RuntimeError)
            and str(found.exc_value) == "Event loop is closed"
        )
        if not late:  # what Python itself reports names an object
            report(found)

    sys.unraisablehook = hook


_without_late_answers()


def _from_tensorstore(error: Exception) -> Exception:
    """It tells what the system said only in its text: `RESOURCE_EXHAUSTED: … No space left on device
    [os_error_code='28']`.
    """
    code = _OS_ERROR.search(str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else error


def _tree_of(metadata: Any) -> Any:
    item = getattr(metadata, "item_metadata", metadata)
    return getattr(item, "tree", item)


def _nest(arrays: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: np.asarray(value)}
    return flat
