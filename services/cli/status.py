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

_TIMEOUT_S = 5.0

type Row = tuple[str, str, str, str]


def main(targets: Sequence[str]) -> int:
    """Prints a line a service; the exit code is 0 if all are ready, else 1. Raises ConfigError."""
    rows = asyncio.run(_ask_all(_services(targets)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    return 0 if all(row[2] == "ready" for row in rows) else 1


def _services(targets: Sequence[str]) -> list[tuple[str, HttpClient]]:
    """Every service asked for, by name."""
    if targets and all("://" in target for target in targets):
        return [(target, HttpClient(target, timeout_s=_TIMEOUT_S)) for target in targets]
    if len(targets) > 1:
        raise ConfigError("give one run's folder, or addresses like http://127.0.0.1:8102")
    folder = RunFolder(Path(targets[0]).absolute() if targets else _newest())
    try:
        record = orjson.loads(folder.processes.read_bytes())
        token = token_for(TokenFiles.model_validate(record["token_files"]), Role.VIEWER)
        ca_file = Path(record["ca_file"]) if record["ca_file"] else None
        return [(name, HttpClient(url, token=token, timeout_s=_TIMEOUT_S, ca_file=ca_file)) for name, url in record["urls"].items()]
    except (OSError, orjson.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{folder.path} is not the folder of a run started here", "give RUN_DIR or the services' addresses") from error


def _newest() -> Path:
    found = sorted(Path("runs").glob("*/processes.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no run in runs/", "give RUN_DIR or the services' addresses")
    return found[-1].parent.absolute()


async def _ask_all(services: Sequence[tuple[str, HttpClient]]) -> list[Row]:
    return list(await asyncio.gather(*(_ask(*service) for service in services)))


async def _ask(name: str, client: HttpClient) -> Row:
    async with client:
        try:
            await client.get("/ready", attempts=1)
            state = "ready"
        except VolleyError as error:
            state = f"not ready: {error.detail}"
        return name, client.base_url, state, await _details(client, name)


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
