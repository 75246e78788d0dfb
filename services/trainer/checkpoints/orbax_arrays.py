"""Named arrays in an Orbax folder. Only this module of the trainer imports Orbax."""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from services.trainer.checkpoints.stored_arrays import open_arrays
from services.trainer.models.arrays import Arrays, HostArray
from shared.run.array_files import os_error


class OrbaxArrays:
    """`ArrayFiles` of checkpoints, in the format that rollout servers load."""

    def write(self, folder: Path, arrays: Arrays) -> None:
        """Write arrays, uncompressed: the files are written once, read soon, and removed. Raises OSError."""

        def save() -> None:
            with ocp.Checkpointer(_handler(arrays)) as checkpointer:
                checkpointer.save(folder, ocp.args.PyTreeSave(_nest(arrays)))

        _raising_os_errors(save)

    def write_shards(self, folder: Path, arrays: Arrays) -> None:
        """Write one copy of the shards on this process's devices into an existing folder.

        Every process of the mesh does so, then one of them calls `finish`. Raises OSError.
        """
        args = ocp.args.PyTreeSave(_nest(arrays))
        _raising_os_errors(lambda: _handler(arrays).save(epath.Path(folder), args=args))

    def finish(self, folder: Path) -> None:
        """Combine the shards of all processes into one checkpoint. Raises OSError."""
        _raising_os_errors(lambda: _handler({}).finalize(epath.Path(folder)))

    def read(self, folder: Path) -> dict[str, HostArray]:
        """Open arrays, which are read when used. Raises WeightsError, and Unavailable if they cannot be read now."""
        return dict(open_arrays(folder))


def _handler(arrays: Arrays) -> ocp.PyTreeCheckpointHandler:
    """Make a handler that holds about a gigabyte of arrays, or the largest one, in host memory at once."""
    largest = max((math.prod(value.shape) * value.dtype.itemsize for value in arrays.values()), default=0)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=False,
        use_compression=False,
        save_device_host_concurrent_gb=1 + largest // 10**9,
    )


def _raising_os_errors(call: Callable[[], None]) -> None:
    """Run a call; translate Orbax's errors from the system to OSError.

    Orbax leaves the arrays of a failed save in reference cycles with the traceback; they are collected at once, because
    their memory is needed.
    """
    try:
        call()
    except ValueError as error:
        if (found := os_error(error)) is None:
            raise
    else:
        return
    gc.collect()  # here nothing refers to the first error any more
    raise found


def _without_late_answers() -> None:
    """Silence tracebacks that repeat the error of a failed save.

    Orbax closes its event loop while TensorStore still writes arrays, and leaves tasks whose errors are never
    retrieved; each would print a traceback.
    """
    report = sys.unraisablehook

    def hook(found: sys.UnraisableHookArgs) -> None:
        late = (
            found.object is None
            and isinstance(found.exc_value, RuntimeError)
            and str(found.exc_value) == "Event loop is closed"
        )
        if not late:  # Python's own reports name an object
            report(found)

    def is_news(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, ValueError) and "was never retrieved" in record.msg and os_error(error))

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(is_news)


_without_late_answers()


def _nest(arrays: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
