"""The env service with Harbor's real package, and task folders played in it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from packages.sandbox.tests.harbor_tasks import Conversation, begin, submit, sum_task, zipped
from shared.services_schema import HarborSection, Limits
from tests.env.conftest import OpenClient
from tests.support import foreign
from tests.support.submitted import decided
from volley_sandbox.harbor.containers import HarborSettings

HARBOR = ("harbor==0.26.0",)
LOCAL = "local_harbor:LocalEnvironment"


def harbor_section(**changes: Any) -> HarborSection:
    """Section of a service whose worker has Harbor's real package. Skips the test if it cannot be installed."""
    python = foreign.environment("harbor", HARBOR)
    variables = ("PYTHONPATH", "LOCAL_LOG")
    return HarborSection(**{"environment": LOCAL, "variables": variables, "python": python, **changes})


def harbor_settings(folder: Path, **changes: Any) -> HarborSettings:
    return HarborSettings(harbor_section(**changes), "tested", folder / "trials", folder / "pythons")


@asynccontextmanager
async def served(open_client: OpenClient, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(limits=Limits(), harbor=harbor_section(**changes)) as client:
        yield client


async def taken(client: httpx.AsyncClient, *folders: tuple[str, Mapping[str, str]], **config: Any) -> dict[str, Any]:
    """The version after its validation, under a name of its own."""
    name = f"task-{uuid.uuid4().hex[:8]}"
    answer = await submit(client, zipped(*folders), name, **config)
    assert answer.status_code == 202, answer.text
    return dict(await decided(client, name))


async def playing(client: httpx.AsyncClient, **config: Any) -> Conversation:
    """An episode of a task that was taken."""
    return await begin(client, await task_of(client, **config))


async def task_of(client: httpx.AsyncClient, **config: Any) -> str:
    """Name of an environment with the task of `sum_task`, validated."""
    row = await taken(client, ("", sum_task()), **config)
    assert row["state"] == "active", (row["why"], row["report"])
    return str(row["name"])


def worker_in(folder: Path) -> int:
    """Pid of the worker whose settings name the folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if "worker.py" in (text := path.read_text(encoding="utf-8")) and str(folder) in text:
                return int(path.parent.name)
    raise LookupError(folder)
