"""Reads a set of weights from disk as numpy arrays; the only importer of orbax here.

Every leaf is restored whole as numpy, whatever mesh of devices the trainer wrote it from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors import SafetensorError
from safetensors.flax import load_file

from shared.errors import WeightsError

_KNOWN: dict[bytes, Any] = {}
"""What `_as_numpy` found last, by the bytes of `_METADATA`."""


def restore(path: str, kind: str) -> dict[str, np.ndarray]:
    """Flat weights of an Orbax params folder (kind "orbax") or of a Hugging Face folder ("hf").

    Raises WeightsError if the folder is not a whole checkpoint.
    """
    folder = Path(path)
    return _orbax(folder) if kind == "orbax" else _safetensors(folder)


def _orbax(folder: Path) -> dict[str, np.ndarray]:
    handler = ocp.PyTreeCheckpointHandler()
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            args = _as_numpy(checkpointer, folder.absolute())
            tree = checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=args))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder} is not a whole Orbax checkpoint: {_first_line(error)}") from error
    return _flatten(tree)


def _as_numpy(checkpointer: ocp.Checkpointer, folder: Path) -> Any:
    """How to restore each leaf. Orbax is asked once for all checkpoints of the same description: TensorStore never
    frees what it tells (5 kB an array, up to 0.1.86 at least), and a run restores at each of its steps.
    """
    description = (folder / "_METADATA").read_bytes()
    if description not in _KNOWN:
        tree = checkpointer.metadata(folder).item_metadata.tree
        _KNOWN.clear()
        _KNOWN[description] = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return _KNOWN[description]


def _flatten(tree: Any, prefix: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """{"a": {"b": {"value": x}}} to {"a.b": x}: nnx wraps each leaf in a `value`."""
    if not isinstance(tree, dict):
        names = prefix[:-1] if prefix[-1] == "value" else prefix
        return {".".join(names): np.asarray(tree)}
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        flat |= _flatten(value, (*prefix, str(key)))
    return flat


def _safetensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file")
    weights: dict[str, np.ndarray] = {}
    try:
        for file in files:
            weights |= {name: np.asarray(value) for name, value in load_file(file).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{folder} cannot be read: {_first_line(error)}") from error
    return weights


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
