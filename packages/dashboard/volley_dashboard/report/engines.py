"""Engines of a run's rollout servers, from its settings and from hand-over lines."""

from __future__ import annotations

from collections.abc import Mapping

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.engines import DeclaredEngine
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run.folder import RunFolder

_MOST = 20


def read(folder: RunFolder, kind: str | None) -> list[DeclaredEngine]:
    """Each engine once, that of `kind` first, at most 20. Lines and files that cannot be read name none.

    A hand-over can add an engine, or take a capability away; that the engine of the settings lacks one, it cannot deny.

    Args:
        kind: `rollout.engine.kind` in the run's settings; None if they cannot be read.
    """
    found = {} if kind is None else dict.fromkeys([DeclaredEngine.of_kind(kind)])
    try:
        for line in whole_lines(folder.handovers):
            found |= dict.fromkeys(_of_line(line))
            if len(found) >= _MOST:
                break
    except OSError:  # `verify` names it
        pass
    return [*found][:_MOST]


def unproven(folder: RunFolder, kind: str) -> list[str]:
    """Return sentences on engines whose weights cannot be checked."""
    return [one.unproven for one in read(folder, kind) if one.unproven is not None]


def _of_line(line: bytes) -> list[DeclaredEngine]:
    try:
        handover = codec.from_record(line, "a line", MAX_LINE_VALUES)
    except DecodeError:
        return []
    servers = handover.get("servers") if isinstance(handover, Mapping) else None
    named = [one.get("engine") for one in servers if isinstance(one, Mapping)] if isinstance(servers, list) else []
    return [engine for one in named if (engine := DeclaredEngine.from_json(one)) is not None]
