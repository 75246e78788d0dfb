"""What crashes, retuning and restarts leave behind is proven: nobody has manipulated these folders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.cli.layout import RunFolder
from services.cli.runs import claimed
from services.cli.verify import command
from shared import config
from shared.types import WeightVersion
from tests.support import small_run
from tests.support.small_run import RUN, Incarnation

RATE = "trainer.optimizer_config.learning_rate"


def lived(folder: Path, script: Callable[[Incarnation], Awaitable[None]]) -> None:
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor).run(script))


def amend(folder: Path, *overrides: str) -> None:
    """As `volley up` does, whose trainer is killed before it has begun."""
    with claimed(config.stored(folder, overrides)):
        pass


def violations(folder: Path) -> list[dict[str, Any]]:
    return command.verify(RunFolder(folder))["violations"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


async def done(trainer: Incarnation) -> None:
    await trainer.until(lambda board: board.phase == "done")


async def begun(trainer: Incarnation) -> None:
    await trainer.until(lambda board: board.phase == "waiting")


async def three_steps(trainer: Incarnation) -> None:
    trainer.feed(1, 2, 3, 4, version=WeightVersion(1, 0))
    await trainer.until(lambda board: board.durable_step == 2 and board.phase == "waiting")
    trainer.feed(5, 6, version=WeightVersion(1, 2))
    await trainer.until(lambda board: board.durable_step == 3 and board.phase == "waiting")


def test_a_trainer_that_starts_again_after_the_end(tmp_path: Path):
    folder = small_run.make(tmp_path / RUN)
    for _ in range(2):
        lived(folder, done)
        assert violations(folder) == []


def test_retuned_and_then_the_newest_checkpoint_is_damaged(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)
    lived(folder, three_steps)
    flip(folder / "checkpoints" / "e000001-s000003" / "params" / "w.npy")
    amend(folder, f"{RATE}=0.5")
    lived(folder, begun)
    assert violations(folder) == []


def test_retuned_twice_and_all_checkpoints_since_are_damaged(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)
    lived(folder, three_steps)
    amend(folder, f"{RATE}=0.5")
    lived(folder, begun)
    amend(folder, f"{RATE}=0.25", "trainer.max_steps=6")
    flip(folder / "checkpoints" / "e000002-s000003" / "params" / "w.npy")  # a link to that of e000001-s000003
    lived(folder, begun)
    assert violations(folder) == []
