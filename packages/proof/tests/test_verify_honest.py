"""What crashes, retuning and restarts leave behind is proven: nobody has manipulated these folders."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import config
from shared.run.checkpoint_files import BAD
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from tests.support import small_run
from tests.support.small_run import RUN, Incarnation
from volley.runs.record import claimed, mark_finished
from volley_proof.verify import command

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


def failed(ticket: int) -> Group:
    return Group(ticket, "toy", f"train/{ticket}", (), failure="Timeout")


def set_aside(folder: Path, *versions: str) -> None:
    """As a trainer does that is killed right afterwards."""
    (folder / "checkpoints" / BAD).mkdir()
    for version in versions:
        (folder / "checkpoints" / version).rename(folder / "checkpoints" / BAD / version)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


async def done(trainer: Incarnation) -> None:
    await trainer.until(lambda status: status.phase == "done")


async def begun(trainer: Incarnation) -> None:
    await trainer.until(lambda status: status.phase == "waiting")


async def three_steps(trainer: Incarnation) -> None:
    trainer.feed(1, 2, 3, 4, version=WeightVersion(1, 0))
    await trainer.until(lambda status: status.durable_step == 2 and status.phase == "waiting")
    trainer.feed(5, 6, version=WeightVersion(1, 2))
    await trainer.until(lambda status: status.durable_step == 3 and status.phase == "waiting")


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


def test_made_shorter_while_tickets_are_under_way(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)

    async def one_step(trainer: Incarnation) -> None:
        trainer.feed(1, 2, version=WeightVersion(1, 0))
        await trainer.until(lambda status: status.durable_step == 1 and status.phase == "waiting")

    async def the_last(trainer: Incarnation) -> None:
        may_save, save = threading.Event(), trainer.backend.save

        def late(state: TrainerState, base: WeightVersion | None) -> Path:
            assert state.step < 2 or may_save.wait(60)
            return save(state, base)

        trainer.backend.save = late
        trainer.feed(3, 4, version=WeightVersion(1, 1))
        await trainer.until(lambda status: status.phase == "saving")
        trainer.queue.entries.append(failed(6))
        await trainer.until(lambda status: status.tickets.get("failed"))
        may_save.set()
        await done(trainer)

    lived(folder, one_step)
    with claimed(config.stored(folder, ["trainer.max_steps=2"])) as claim:
        lived(folder, the_last)
        mark_finished(claim.folder, claim.record)
    assert violations(folder) == []


def test_tickets_that_a_trainer_ended_whose_only_checkpoint_is_damaged(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)

    async def fails(trainer: Incarnation) -> None:
        trainer.queue.entries += [failed(8), failed(7)]
        await trainer.until(lambda status: status.tickets.get("failed") == 2)

    lived(folder, three_steps)
    lived(folder, fails)
    set_aside(folder, "e000002-s000003")
    assert violations(folder) == []


def test_tickets_that_ended_at_steps_whose_checkpoints_are_damaged(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)

    async def fails(trainer: Incarnation) -> None:
        await three_steps(trainer)
        trainer.queue.entries += [failed(8), failed(11)]
        await trainer.until(lambda status: status.tickets.get("failed") == 2)

    lived(folder, fails)
    set_aside(folder, "e000001-s000002", "e000001-s000003")
    assert violations(folder) == []


def flat(ticket: int, version: WeightVersion) -> Group:
    made = small_run.group(ticket, version)
    return replace(made, trajectories=tuple(replace(one, reward=0.5) for one in made.trajectories))


def test_groups_that_were_filtered_are_counted_by_rule(tmp_path: Path):
    folder = small_run.write_config(tmp_path / RUN)
    amend(folder, "trainer.filters.zero_variance=true", "trainer.max_steps=2")

    async def one_step(trainer: Incarnation) -> None:
        trainer.queue.entries += [flat(ticket, WeightVersion(1, 0)) for ticket in (1, 2, 3)]
        trainer.feed(4, 5, version=WeightVersion(1, 0))
        await trainer.until(lambda status: status.durable_step == 1 and status.phase == "waiting")
        trainer.queue.entries.append(flat(6, WeightVersion(1, 1)))
        await trainer.until(lambda status: status.filtered == {"zero_variance": 4})

    async def the_rest(trainer: Incarnation) -> None:
        trainer.feed(7, 8, version=WeightVersion(2, 1))
        await done(trainer)

    lived(folder, one_step)
    assert violations(folder) == []
    lived(folder, the_rest)
    result = command.verify(RunFolder(folder))
    assert result["violations"] == []
    assert result["by_disposition"] == {"trained": 4, "filtered(zero_variance)": 4}


def test_a_run_that_was_stopped_before_its_first_checkpoint(tmp_path: Path):
    """Nothing is claimed of it; whatever is, is more than is durable."""
    folder = RunFolder(small_run.write_config(tmp_path / RUN))
    result = command.verify(folder)
    assert (result["ok"], result["steps"], result["redis"]) == (True, 0, "the run's folder names no Redis")
    assert command.format_result(result).endswith("\nproven: nothing was trained")
    folder.sft.write_text(
        '{"step":0}\n{"step":7}\n', encoding="utf-8"
    )  # of a warm start, or before the first checkpoint of SFT
    folder.evals.write_text('{"step":0}\n', encoding="utf-8")
    assert violations(folder.path) == []
    for file in (folder.ledger, folder.metrics, folder.refused, folder.evals, folder.handovers):
        file.write_text('{"step":1}\n', encoding="utf-8")
        assert f"progress is recorded in {file.name}" in violations(folder.path)[0]["detail"]
        file.unlink()
    with claimed(config.stored(folder.path)) as claim:
        mark_finished(claim.folder, claim.record)
    assert "progress is recorded in run.json" in violations(folder.path)[0]["detail"]
    lived(folder.path, three_steps)
    shutil.rmtree(folder.checkpoints)
    for file in (folder.ledger, folder.metrics):
        file.unlink()
    assert "progress is recorded in handovers.jsonl, archive" in violations(folder.path)[0]["detail"]
