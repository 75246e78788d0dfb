"""Trainer's values of archived tokens, as `volley replay --tokens` writes them: `tokens/e000001/s000042.msgpack`.

A file holds {schema, run, version, episodes: [[ticket, sample, logprobs, advantages, marks, weights], …]} for the step
that made `version`; the last two are absent if they are not known. It is no part of the proof: it can be
made again from archive and checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared import codec
from shared.errors import DecodeError
from shared.files.reading import read_file
from shared.files.storage import replace, storage
from shared.types import WeightVersion

SCHEMA = 1
_MOST_BYTES = 2**28
_MOST_VALUES = 2**22


CLIPPED, TRUNCATED, REJECTED = 1, 2, 4
"""Marks of a token: a bound of the loss applies, its importance weight is capped, or the loss rejects it."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of an episode's N stored tokens (see `Trajectory.stored`) at the start of a step.

    `logprobs` float32 [N]: the trainer's log-probabilities, natural log; `advantages` float32 [N]. `marks` uint8 [N]
    say how the loss treats each token, `weights` float32 [N] are the importance weights; None if they are not known.
    """

    logprobs: np.ndarray
    advantages: np.ndarray
    marks: np.ndarray | None = None
    weights: np.ndarray | None = None


type OfEpisodes = Mapping[tuple[int, int], TokenValues]
"""By ticket and sample."""


def path_of(root: Path, version: WeightVersion) -> Path:
    return root / f"e{version.epoch:06d}" / f"s{version.step:06d}.msgpack"


def write(root: Path, run: str, version: WeightVersion, values: OfEpisodes) -> None:
    """Replace the file of a version. Raises StorageFull."""
    rows = [
        [*key, one.logprobs, one.advantages, *([] if one.marks is None else [one.marks, one.weights])]
        for key, one in values.items()
    ]
    record = {"schema": SCHEMA, "run": run, "version": str(version), "episodes": rows}
    path = path_of(root, version)
    with storage(root.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, codec.pack(record))


def read(root: Path, run: str, version: WeightVersion) -> OfEpisodes:
    """Read the file of a version; empty if there is none. Raises DecodeError for another or a damaged file."""
    path = path_of(root, version)
    try:
        record = codec.unpack(read_file(path, _MOST_BYTES), path.name, _MOST_VALUES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise DecodeError(f"{path} does not hold values of tokens", "remove it")
    if (record.get("run"), record.get("version")) != (run, str(version)):
        raise DecodeError(f"{path} belongs to another run or version", "remove it")
    try:
        return {(int(t), int(s)): _values(rest) for t, s, *rest in record["episodes"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"{path} is damaged: {error}"[:300], "remove it") from error


def _values(found: Sequence[object]) -> TokenValues:
    dtypes = (np.float32, np.float32, np.uint8, np.float32)
    arrays = [one for one in found if isinstance(one, np.ndarray)]
    if len(arrays) != len(found) or len(found) not in (2, 4):
        raise ValueError("values of an episode are not arrays")
    if any(one.dtype != dtype or len(one) != len(arrays[0]) for one, dtype in zip(arrays, dtypes, strict=False)):
        raise ValueError("values of an episode have other types or lengths")
    return TokenValues(*arrays)
