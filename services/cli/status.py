"""`volley status`: each service of a run, whether it is ready, and the weights it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from services.cli.layout import RunFolder
from shared.access import Role, token_for
from shared.clients.base import HttpClient
from shared.errors import ConfigError, VolleyError
from shared.schema import TokenFiles

type Row = tuple[str, str, str, str]


def main(targets: Sequence[str]) -> int:
    """Prints a line a service; the exit code is 0 if all are ready, else 1. Raises ConfigError."""
    rows = asyncio.run(_ask_all(_services(targets)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    return 0 if all(row[2] == "ready" for row in rows) else 1


def _services(targets: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """(name, address, token) of every service asked for."""
    if targets and all("://" in target for target in targets):
        return [(target, target, None) for target in targets]
    if len(targets) > 1:
        raise ConfigError("give one run's folder, or addresses like http://127.0.0.1:8102")
    folder = RunFolder(Path(targets[0]).absolute() if targets else _newest())
    try:
        record = orjson.loads(folder.processes.read_bytes())
        token = token_for(TokenFiles.model_validate(record["token_files"]), Role.VIEWER)
        return [(name, url, token) for name, url in record["urls"].items()]
    except (OSError, orjson.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{folder.path} is not the folder of a run started here", "give RUN_DIR or the services' addresses") from error


def _newest() -> Path:
    found = sorted(Path("runs").glob("*/processes.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no run in runs/", "give RUN_DIR or the services' addresses")
    return found[-1].parent.absolute()


async def _ask_all(services: Sequence[tuple[str, str, str | None]]) -> list[Row]:
    return list(await asyncio.gather(*(_ask(*service) for service in services)))


async def _ask(name: str, url: str, token: str | None) -> Row:
    async with HttpClient(url, token=token, timeout_s=5.0) as client:
        try:
            await client.get("/ready", attempts=1)
            state = "ready"
        except VolleyError as error:
            state = f"not ready: {error.detail}"
        return name, url, state, await _details(client, name)


async def _details(client: HttpClient, name: str) -> str:
    """What the service tells of itself: weights for rollout, the run's state for the others; empty if it does not answer."""
    path = {"rollout": "/weights", "trainer": "/status", "orchestrator": "/runs"}.get(name.partition("-")[0])
    if path is None:
        return ""
    try:
        answer: Any = await client.get(path, attempts=1)
    except VolleyError:
        return ""
    first = answer[0] if isinstance(answer, list) and answer else answer
    keys = ("current", "staged", "state", "reason", "step", "version", "epoch")
    return ", ".join(f"{key} {first[key]}" for key in keys if isinstance(first, dict) and first.get(key) not in (None, ""))
