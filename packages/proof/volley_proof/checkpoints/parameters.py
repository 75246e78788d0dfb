"""Checksums of the arrays of a run's checkpoints, as the run's log has them.

`python -m volley_proof.checkpoints.parameters RUN_DIR VERSION…` writes {ok, checksums, damaged}, both by version,
after each version; the last line holds all.

The folder is untrusted: the process reads no more of an array than the files have bytes, a part at a time, and limits
its own memory and CPU time.
"""

from __future__ import annotations

import hashlib
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.trainer.checkpoints.stored_arrays import StoredArray, open_arrays
from shared.errors import VolleyError, WeightsError
from shared.run import checkpoint_files
from shared.run.checkpoint_files import PARAMS, Manifest
from shared.run.checksums import Checksums
from shared.run.folder import RunFolder
from shared.run.state import OPTIMIZER

_MASTER, _OPTIMIZER, _CRITIC = "master.", "optimizer.", "critic."
_BESIDE_BYTES = 768 * 2**20
_COPIES = 2
"""Copies of an array in memory: the file's bytes, and numpy's."""
_CPU_S, _BYTES_A_SECOND = 20, 10**7
_PART = 2**22
"""Most elements that are read at once, unless one row has more."""
_PRECISION = {"bfloat16": (2.0**-7, 2.0**-126), "float16": (2.0**-10, 2.0**-14)}
"""Relative precision and smallest normal number: devices round differently, and flush smaller numbers differently."""
_WORDS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_GOLDEN, _FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the checksums; return exit code 0, also for damaged checkpoints, which are printed as such."""
    run_dir, *versions = sys.argv[1:] if argv is None else argv
    found, damaged = dict[str, Checksums](), dict[str, str]()
    for version in versions:
        try:
            found[version] = checksums_of(RunFolder(Path(run_dir)).checkpoints / version)
        except VolleyError as error:
            damaged[version] = error.detail
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            damaged[version] = f"{type(error).__name__}: {error}"[:300]
        sys.stdout.write(orjson.dumps({"ok": True, "checksums": found, "damaged": damaged}).decode() + "\n")
        sys.stdout.flush()
    return 0


def checksums_of(folder: Path) -> Checksums:
    """Compute the checksums of a checkpoint's trained parameters and optimizer state, with those of a critic.

    They equal `Policy.checksum` and `optimizer_checksum`.

    Raises WeightsError if the arrays are invalid, or differ from the manifest, and Unavailable.
    """
    manifest = checkpoint_files.read_manifest(folder)
    params, training = open_arrays(folder / manifest.path), open_arrays(folder / OPTIMIZER)
    _check_description(manifest, params)
    master = {name.removeprefix(_MASTER): value for name, value in training.items() if name.startswith(_MASTER)}
    state = {name.removeprefix(_OPTIMIZER): value for name, value in training.items() if name.startswith(_OPTIMIZER)}
    critic = {f"critic {name}": value for name, value in state.items() if name.startswith(_CRITIC)}
    if master:
        _check_rounding(master, params)
    return {PARAMS: checksum({**(master or params), **critic}), OPTIMIZER: checksum(state)}


def checksum(arrays: Mapping[str, StoredArray | np.ndarray]) -> str:
    """Compute `services.trainer.learner.checksum.checksum` of arrays in files."""
    names = sorted(arrays)
    digest = hashlib.sha256("\n".join(names).encode())
    digest.update(np.array([_sum(arrays[name]) for name in names], np.uint32).tobytes())
    return digest.hexdigest()[:32]


def _check_description(manifest: Manifest, params: Mapping[str, StoredArray]) -> None:
    """Raise WeightsError if shapes or dtypes differ from the manifest."""
    described = {leaf.key: (leaf.shape, leaf.dtype) for leaf in manifest.tree}
    found = {name: (value.shape, str(value.dtype)) for name, value in params.items()}
    for name in sorted(described.keys() | found.keys()):
        if described.get(name) != found.get(name):
            recorded, there = described.get(name, "not there"), found.get(name, "not there")
            raise WeightsError(
                f"{manifest.version}: its manifest says of {name[:100]} {recorded}, its files {there}"[:300]
            )


def _check_rounding(master: Mapping[str, StoredArray], params: Mapping[str, StoredArray]) -> None:
    """Raise WeightsError unless `params` are the float32 `master`, rounded to the published dtype."""
    for name in sorted(master.keys() | params.keys()):
        exact, rounded = master.get(name), params.get(name)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            raise WeightsError(f"{name[:100]} differs in presence or shape between parameters and optimizer")
        if exact.dtype != np.float32 or str(rounded.dtype) not in _PRECISION:
            raise WeightsError(f"{name[:100]} is of {rounded.dtype}, and the optimizer holds it in {exact.dtype}")
        relative, least = _PRECISION[str(rounded.dtype)]
        for one, other in zip(_parts(exact), _parts(rounded), strict=True):
            if not np.allclose(one, other.astype(np.float32), relative, least, equal_nan=True):
                raise WeightsError(f"{name[:100]} is not the optimizer's value rounded to {rounded.dtype}")


def _sum(leaf: StoredArray | np.ndarray) -> int:
    """Sum the hashes of all elements, modulo 2**32."""
    if leaf.dtype.itemsize not in _WORDS:
        raise WeightsError(f"a parameter is of {leaf.dtype}")
    total, at = 0, 0
    for part in _parts(leaf):
        words = np.ascontiguousarray(part).view(_WORDS[leaf.dtype.itemsize]).reshape(-1).astype(np.uint32)
        position = np.arange(at, at + words.size, dtype=np.uint64).astype(np.uint32)
        at += words.size
        position *= _GOLDEN
        words += position
        words ^= words >> 16
        words *= _FIRST
        words ^= words >> 13
        words *= _SECOND
        words ^= words >> 16
        total += int(words.sum(dtype=np.uint64))
    return total % 2**32


def _parts(leaf: StoredArray | np.ndarray) -> Iterator[np.ndarray]:
    """Yield all elements in order, some rows at a time; each chunk of a file is read at most twice."""
    if not leaf.shape:
        yield np.asarray(leaf[...]).reshape(1)
        return
    rows = max(1, _PART // max(1, math.prod(leaf.shape[1:])))
    chunk = leaf.chunk_rows if isinstance(leaf, StoredArray) else 1
    held = rows * -(-chunk // rows)
    for begin in range(0, leaf.shape[0], held):
        block = np.asarray(leaf[begin : min(begin + held, leaf.shape[0])])
        yield from (block[at : at + rows] for at in range(0, len(block), rows))


def _limit(n_bytes: int) -> None:
    """Limit memory and CPU time of this process by the bytes that it will read.

    The system kills it beyond that: a database of a few kilobytes may unpack to gigabytes in TensorStore.
    """
    limits = {
        resource.RLIMIT_DATA: _BESIDE_BYTES + _COPIES * n_bytes,
        resource.RLIMIT_CPU: _CPU_S + n_bytes // _BYTES_A_SECOND,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def _bytes_of(run_dir: str, versions: Sequence[str]) -> int:
    folders = [RunFolder(Path(run_dir)).checkpoints / version for version in versions]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    _limit(_bytes_of(sys.argv[1], sys.argv[2:]))
    raise SystemExit(main())
