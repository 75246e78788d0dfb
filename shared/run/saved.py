"""checkpoints.jsonl: a line a checkpoint, with the digest of its manifest, written before the checkpoint has its name.

The manifest leads to every file of the checkpoint, so whoever changes one and makes the digests in its folder anew
contradicts this file. Commit records name a digest of this file in turn (see shared.run.held).

Invariant: a checkpoint has its line before it has its name. Of several lines of a version the last counts: the first
ones were of attempts that failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from shared import codec
from shared.errors import DecodeError, WeightsError
from shared.files import storage
from shared.files.reading import whole_lines
from shared.run.checkpoint_files import BAD, MANIFEST, digest, unreadable
from shared.run.folder import RunFolder
from shared.types import WeightVersion

_MOST_VALUES = 20


def append(root: Path, version: WeightVersion, manifest: str) -> None:
    """Durable when it returns. Raises StorageUnavailable. Args: root: the folder of checkpoints."""
    path = RunFolder(root.parent).saved
    line = {"version": str(version), "step": version.step, "manifest": manifest, "time": time.time()}
    storage.append(path, orjson.dumps(line) + b"\n", durable=True)


def named(run: RunFolder) -> dict[WeightVersion, str]:
    """The digest of each version's manifest; lines that cannot be read are left out. Raises OSError."""
    return {version: manifest for _, found in lines(run) if found is not None for version, manifest in [found]}


def lines(run: RunFolder) -> Iterator[tuple[int, tuple[WeightVersion, str] | None]]:
    """Each line with its number; None for one that cannot be read. Blank lines are left out. Raises OSError."""
    for number, text in enumerate(whole_lines(run.saved), start=1):
        if text.strip():
            yield number, _parsed(text)


def check(folder: Path) -> None:
    """Raises WeightsError if the manifest of this checkpoint is not the one that checkpoints.jsonl names, and
    Unavailable if one of them cannot be read now. A version without a line is of an older trainer.
    """
    version = WeightVersion.of_name(folder.name)
    if version is None:
        return
    root = folder.parent.parent if folder.parent.name == BAD else folder.parent
    run = RunFolder(root.parent)
    try:
        expected = named(run).get(version)
        found = None if expected is None else digest(folder / MANIFEST)
    except OSError as error:
        raise unreadable(str(error.filename or run.saved), error) from error
    if found != expected:
        raise WeightsError(
            f"{version}: its manifest is not the one that {run.saved.name} names",
            "somebody has changed the checkpoint: restore it, or go back to an older one",
        )


def _parsed(text: bytes) -> tuple[WeightVersion, str] | None:
    try:
        line = codec.from_record(text, "a line of checkpoints", _MOST_VALUES)
        version, manifest = WeightVersion.parse(line["version"]), line["manifest"]
        return (version, manifest) if isinstance(manifest, str) and line["step"] == version.step else None
    except (KeyError, TypeError, DecodeError):
        return None
