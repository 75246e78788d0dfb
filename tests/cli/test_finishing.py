"""`volley train` ends when the last checkpoint is written, not when the last step is trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from shared.errors import ServiceUnreachable
from shared.run.folder import RunFolder
from volley.commands import train
from volley.local.stack import LocalStack
from volley.reporting.progress import PlainLines, RecordTails

PLANNED = {"plan": "mesh fsdp 1"}


class Services:
    """A stack whose orchestrator says finished, and whose trainer gives these answers in turn; None: no answer."""

    def __init__(self, *trainer: dict[str, Any] | None) -> None:
        self.left = [PLANNED, *trainer]

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[Any]:
        yield Client(self, name)


class Client:
    def __init__(self, services: Services, name: str) -> None:
        self.services, self.name = services, name

    async def get(self, path: str, attempts: int = 1) -> dict[str, Any]:
        if self.name == "orchestrator":
            return {"state": "finished"}
        if (answer := self.services.left.pop(0)) is None:
            raise ServiceUnreachable("it was killed")
        return answer


@pytest.mark.parametrize("phase", ["done", "refused"])
async def test_a_run_is_not_over_before_its_last_checkpoint(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_POLL_S", 0.0)
    services = Services({"phase": "saving"}, None, {"phase": "replaying"}, {"phase": phase})
    folder = RunFolder(tmp_path)
    await train.follow(cast(LocalStack, services), folder, PlainLines(2, lambda line: None), RecordTails(folder))
    assert services.left == []
