"""checkpoints.jsonl: a line per checkpoint with its manifest's digest.

The manifest covers every file of the checkpoint, so a changed checkpoint contradicts this file even if the digests in
its folder were recomputed. Commit records in turn hold a digest of this file (see shared.run.protected_files).

Invariant: a checkpoint's line is written before the checkpoint gets its name. The last line of a version counts;
earlier ones belong to failed attempts.
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
    """Append a line; it is durable on return. Raises StorageUnavailable. Args: root: the folder of checkpoints."""
    path = RunFolder(root.parent).saved
    line = {"version": str(version), "step": version.step, "manifest": manifest, "time": time.time()}
    storage.append(path, orjson.dumps(line) + b"\n", durable=True)


def named(run: RunFolder) -> dict[WeightVersion, str]:
    """Return the manifest's digest of each version, ignoring unreadable lines. Raises OSError."""
    return {version: manifest for _, found in lines(run) if found is not None for version, manifest in [found]}


def lines(run: RunFolder) -> Iterator[tuple[int, tuple[WeightVersion, str] | None]]:
    """Yield each nonblank line with its number; None for an unreadable one. Raises OSError."""
    for number, text in enumerate(whole_lines(run.saved), start=1):
        if text.strip():
            yield number, _parsed(text)


def check(folder: Path) -> None:
    """Check that the manifest of this checkpoint is the one that checkpoints.jsonl names.

    Raises WeightsError if it is not, and Unavailable if one of them cannot be read now. Versions without a line pass:
    the file may have lost lines, which `volley verify` reports.
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
            "the checkpoint was changed: restore it, or go back to an older one",
        )


def _parsed(text: bytes) -> tuple[WeightVersion, str] | None:
    try:
        line = codec.from_record(text, "a line of checkpoints", _MOST_VALUES)
        version, manifest = WeightVersion.parse(line["version"]), line["manifest"]
        return (version, manifest) if isinstance(manifest, str) and line["step"] == version.step else None
    except (KeyError, TypeError, DecodeError):
        return None
