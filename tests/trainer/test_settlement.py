"""Of a step that is recorded: when a checkpoint may be made of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.settlement import Settlement
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.waiter import Waiter
from shared.errors import Unavailable
from shared.run.archive import Archive
from shared.run.state import initial_state
from shared.types import WeightVersion


class Parts:
    def __init__(self, folder: Path) -> None:
        self.metrics, self.archive = StepLog(folder / "metrics.jsonl"), Archive(folder / "archive", "r")


def settled(folder: Path) -> Settlement:
    status, parts, state = TrainerStatus("r", 1), Parts(folder), initial_state(0)
    waiter: Any = Waiter(None, status)  # type: ignore[arg-type]
    return Settlement(parts, None, status, waiter, state, WeightVersion(0, 0), 1)  # type: ignore[arg-type]


async def test_a_checkpoint_waits_for_tickets_that_are_being_ended(tmp_path: Path):
    settlement, written = settled(tmp_path), asyncio.Event()

    async def ending() -> None:
        async with settlement.exclusive:
            with settlement.unrecorded([7]):
                await written.wait()

    ends = asyncio.create_task(ending())
    await asyncio.sleep(0)
    asks = asyncio.create_task(settlement.savable())
    await asyncio.sleep(0)
    assert not asks.done()
    written.set()
    assert (await asks).step == 0
    await ends


async def test_there_is_no_checkpoint_of_what_could_not_be_recorded(tmp_path: Path):
    settlement = settled(tmp_path)
    with pytest.raises(OSError, match="no room"), settlement.unrecorded([7, 8]):
        raise OSError("no room")
    with pytest.raises(Unavailable, match="records tickets 7, 8"):
        await settlement.savable()
