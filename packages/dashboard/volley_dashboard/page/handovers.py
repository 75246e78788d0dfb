"""Hand-overs of weights for a run's page, from the lines of handovers.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST = 40
_OF_TRAINER = ("record_s", "commit_s", "take_s", "chunk_s")


def handovers(rows: Sequence[Mapping[str, Any]], mode: str) -> list[dict[str, Any]]:
    """Return the newest hand-overs, a row for each server and version, newest first.

    A row has `version`, `step`, `mode`, `n_bytes` of the whole weights, `delta_bytes` sent instead, seconds that the
    trainer waited (`trainer_s`), and of the server `url`, seconds of the call (`server_s`), `pulled_bytes`, seconds in
    which decoding stood still (`pause_s`), and `error`. A version that no server took has one row without these.

    Args:
        mode: treatment of running requests, as configured.
    """
    return [row for line in reversed(rows[-_MOST:]) for row in _rows(line, mode)]


def _rows(line: Mapping[str, Any], mode: str) -> Iterator[dict[str, Any]]:
    version = {key: line.get(key) for key in ("step", "version", "n_bytes", "delta_bytes")}
    took = {"trainer_s": sum(_number(line.get(key)) or 0.0 for key in _OF_TRAINER), "mode": mode}
    servers = line.get("servers")
    for server in servers if isinstance(servers, list) and servers else [{}]:
        if not isinstance(server, dict):
            continue
        timings = server.get("timings")
        timed = timings if isinstance(timings, dict) else {}
        yield {
            **version,
            **took,
            "url": server.get("url"),
            "server_s": _number(server.get("seconds")),
            "pulled_bytes": _number(timed.get("pulled_bytes")),
            "pause_s": _number(timed.get("pause_s")),
            "error": server.get("error"),
        }


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
