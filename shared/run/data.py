"""Digests of the data behind a run's environments, as evaluations record them.

The environment service computes them and compares its files with its own record (`environments/data.json`). Lines of
evals.jsonl repeat them, so that changed data is refused even if the environment service lost its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import blake3

from shared.errors import ConfigError

type Digests = Mapping[str, str]
"""Digests by part of an environment's data: `train`, `eval`, `databases`, `tools`, `source`, `package`."""
_SHOWN = 16


def combined(parts: Mapping[str, str]) -> dict[str, str]:
    """Merge digests by top-level part: `databases/a` and `databases/b` become `databases`."""
    groups = defaultdict[str, dict[str, str]](dict)
    for part, digest in parts.items():
        groups[part.partition("/")[0]][part] = digest
    return {name: _together(found) for name, found in sorted(groups.items())}


def _together(found: Mapping[str, str]) -> str:
    (first, digest), *others = sorted(found.items())
    if not others and "/" not in first:
        return digest
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
