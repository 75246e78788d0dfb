"""Engines of the rollout servers that a run's hand-overs name; older runs name none."""

from __future__ import annotations

from collections.abc import Mapping

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.engines import DeclaredEngine
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run.folder import RunFolder

_MOST = 20


def read(folder: RunFolder) -> list[DeclaredEngine]:
    """Each engine once, in the order of the lines, at most 20. Lines and files that cannot be read name none."""
    found = dict[DeclaredEngine, None]()
    try:
        for line in whole_lines(folder.handovers):
            found |= dict.fromkeys(_of_line(line))
            if len(found) >= _MOST:
                break
    except OSError:  # `verify` names it
        pass
    return [*found][:_MOST]


def unproven(folder: RunFolder) -> list[str]:
    """Sentences on engines whose weights cannot be checked."""
    return [one.unproven for one in read(folder) if one.unproven is not None]


def _of_line(line: bytes) -> list[DeclaredEngine]:
    try:
        handover = codec.from_record(line, "a line", MAX_LINE_VALUES)
    except DecodeError:
        return []
    servers = handover.get("servers") if isinstance(handover, Mapping) else None
    named = [one.get("engine") for one in servers if isinstance(one, Mapping)] if isinstance(servers, list) else []
    return [engine for one in named if (engine := DeclaredEngine.from_json(one)) is not None]
