"""Digests of the data behind a run's environments, as evaluations record them.

The environment service computes them and compares its files with its own record (`environments/data.json`). Lines of
evals.jsonl repeat them, so that changed data is refused even if the environment service lost its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import blake3

from shared.errors import ConfigError
from shared.run.checkpoint_files import digest

type Digests = Mapping[str, str]
"""Digests by part of an environment's data: `train`, `eval`, `databases`, `tools`, `source`, `package`."""
SOURCE = "source"
"""Part that is a submitted environment's code, and the name of its folder."""
_SHOWN = 16


def tree_digest(folder: Path) -> str:
    """Return the blake3 over names and digests of all files in a folder, recursively. Raises OSError."""
    found = blake3.blake3()
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and "__pycache__" not in one.parts):
        found.update(f"{path.relative_to(folder)}\0{digest(path)}\0".encode())
    return found.hexdigest()


def combined(parts: Mapping[str, str]) -> dict[str, str]:
    """Merge digests by top-level part: `databases/a` and `databases/b` become `databases`."""
    groups = defaultdict[str, dict[str, str]](dict)
    for part, one in parts.items():
        groups[part.partition("/")[0]][part] = one
    return {name: _together(found) for name, found in sorted(groups.items())}


def _together(found: Mapping[str, str]) -> str:
    (first, only), *others = sorted(found.items())
    if not others and "/" not in first:
        return only
    whole = blake3.blake3()
    for part, one in sorted(found.items()):
        whole.update(f"{part}\0{one}\0".encode())
    return whole.hexdigest()


def differing(was: Digests, now: Digests) -> list[str]:
    """Return the parts that both have with different digests. Parts without a digest count as unchanged."""
    return sorted(part for part in was.keys() & now.keys() if was[part] != now[part])


def check(env: str, step: int, was: Digests, now: Digests, sources: Mapping[str, str]) -> None:
    """Raise ConfigError naming a changed part. Args: step: at which `was` was recorded; sources: paths by part."""
    for part in differing(was, now):
        raise ConfigError(
            f"{env}: {sources.get(part, part)} has changed since the evaluation of step {step}: its digest is "
            f"{now[part][:_SHOWN]}, it was {was[part][:_SHOWN]}",
            "put the files of the environment service back as they were, or start a new run",
        )
