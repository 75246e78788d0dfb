"""Follow a supervised run and report it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from shared.run.folder import RunFolder
from volley.local import stack
from volley.local.supervisor import ServiceFailed
from volley.reporting import supervised
from volley.reporting.progress import Activity, ProgressDisplay, RecordTails
from volley.runs.answers import fetch_status
from volley.runs.record import mark_finished
from volley.runs.run_file import RunRecord

_POLL_S = 0.3


async def follow(running: stack.LocalStack, folder: RunFolder, display: ProgressDisplay, tails: RecordTails) -> None:
    """Show progress until the trainer is done. Raises ServiceFailed if the trainer stops training."""
    news = time.monotonic()
    async with running.client("trainer") as trainer:
        while True:
            status = await fetch_status(trainer, "/status")
            if display.detailed:
                display.activity(Activity(trainer=status))
            for kind, record in tails.new():
                display.record(kind, record)
                news = time.monotonic()
            if refused := status.get("refused"):
                raise ServiceFailed(f"run {folder.name} has stopped: {refused}", f"logs: {folder.logs}")
            if status.get("phase") == "done":
                return
            if time.monotonic() - news > display.quiet_s:
                display.quiet(_doing(status))
                news = time.monotonic()
            await asyncio.sleep(_POLL_S)


def _doing(status: Mapping[str, Any]) -> str:
    wait = status.get("waiting_for") or status.get("reason")
    return f"the trainer is {status.get('phase', 'away')}" + (f": {wait}" if wait else "")


def finish(folder: RunFolder, record: RunRecord) -> int:
    """Report a finished run. Returns the exit code."""
    mark_finished(folder, record)
    return supervised.main(folder)
