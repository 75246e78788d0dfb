"""Steps that give numbers that are not finite: never a version, on record with their groups, and undone in memory bit
for bit.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.trainer.loop.refusals import Refusals
from services.trainer.status import TrainerStatus
from shared.config import load
from shared.errors import NonFinite
from shared.files import storage
from shared.run import archive, ledger
from shared.run.folder import RunFolder
from shared.types import Group, WeightVersion
from tests.support import small_run
from tests.support.small_run import Incarnation
from tests.trainer.fakes import Bench, stopped
from volley.runs.record import claimed
from volley_proof.verify import command


def refusals(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in storage.whole_lines(folder / "refused.jsonl")]


def kept(folder: Path) -> dict[str, list[int]]:
    """Tickets of the files of refused groups."""
    return {
        path.relative_to(folder).as_posix(): [Group.decode(x).ticket for x in archive.read_file(path, "r", version)]
        for version, path in archive.refused(folder / "refused")
    }


def ends(folder: Path) -> dict[int, str]:
    return {
        ticket: line["disposition"]
        for ticket, line in ledger.settled(map(orjson.loads, storage.whole_lines(folder / "ledger.jsonl"))).items()
    }


async def test_a_step_that_is_not_finite_stops_the_run_and_is_no_version(bench: Bench):
    bench.backend.spoiling = {4}
    bench.feed(1, 2, 3, 4, 5, 6)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "refused")
    await bench.until(lambda: bench.queue.attended > 3)  # the queue is attended to all the same
    assert (bench.status.step, bench.status.durable_step) == (1, 1)
    reason = bench.status.not_ready()
    assert reason is not None
    assert all(
        part in reason
        for part in (
            "step 2",
            "loss, layer 4",
            "tickets 3, 4",
            "e000001-s000001",
            "learning_rate",
            "--refused e000001-s000002",
        )
    )
    await stopped(running)
    assert [event for event in bench.events if event.startswith(("save", "commit", "rewind", "leave"))] == [
        "save e000001-s000000",
        "commit version=1 tickets=[1, 2] void=0 ledger=2",
        "save e000001-s000001",
        "rewind e000001-s000001",
        "leave refused",
        "leave refused",
    ]
    assert (bench.backend.weights, ends(bench.folder)) == ([1, 2], {1: "trained", 2: "trained"})
    assert kept(bench.folder) == {"refused/e000001/s000002-1.zst": [3, 4]}
    assert archive.versions(bench.folder / "archive") == [WeightVersion(1, 1)]
    assert [(r["version"], r["base"], r["what"], r["tickets"], r["action"]) for r in refusals(bench.folder)] == [
        ("e000001-s000002", "e000001-s000001", ["loss", "layer 4"], [3, 4], "stop")
    ]


async def test_the_good_steps_before_a_refused_one_are_made_again_and_saved(bench: Bench):
    bench.interval, bench.max_staleness, bench.max_steps, bench.backend.spoiling = 4, 9, 9, {5}
    bench.feed(1, 2, 3, 4, 5, 6)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "refused")
    await stopped(running)
    assert [event for event in bench.events[5:] if not event.startswith(("publish", "commit"))] == [
        *(f"step {tickets}" for tickets in ([1, 2], [3, 4], [5, 6])),
        "rewind e000001-s000000",
        *(f"step {tickets}" for tickets in ([1, 2], [3, 4])),
        "leave refused",
        "save e000001-s000002",
        "leave refused",
    ]
    assert bench.backend.checkpoint is not None
    assert (bench.backend.checkpoint.step, bench.backend.checkpoint.low) == (2, 4)
    assert bench.backend.kept[WeightVersion(1, 2)] == [1, 2, 3, 4]


async def test_the_next_trainer_goes_on_from_the_last_good_version(bench: Bench):
    bench.backend.spoiling = {3}
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "refused")
    await stopped(running)
    bench.status, bench.backend.spoiling = TrainerStatus("r", 2), set()
    bench.feed(3, 4)  # Redis gives what is not committed again
    bench.events.clear()
    await bench.run_to_the_end()
    assert bench.events[1] == "begin low=2 version=1 issued=4 void=0 done=[]"
    assert bench.backend.weights == [1, 2, 3, 4]


@pytest.mark.parametrize("interval", [1, 2])
async def test_a_skipped_step_ends_its_tickets_and_the_next_groups_make_the_step(bench: Bench, interval: int):
    bench.on_nonfinite, bench.interval, bench.max_staleness, bench.max_steps = "skip", interval, 9, 2
    bench.backend.spoiling = {3, 5}
    bench.feed(*range(1, 9))
    await bench.run_to_the_end()
    assert bench.status.step == 2
    assert bench.backend.kept[WeightVersion(1, 2)] == [1, 2, 7, 8]
    assert ends(bench.folder) == {t: "nonfinite" if t in (3, 4, 5, 6) else "trained" for t in range(1, 9)}
    assert bench.backend.checkpoint is not None
    assert (bench.backend.checkpoint.low, bench.backend.checkpoint.void) == (8, 4)
    assert kept(bench.folder) == {"refused/e000001/s000002-1.zst": [3, 4], "refused/e000001/s000002-2.zst": [5, 6]}
    digests = {
        line["ticket"]: line["digest"] for line in map(orjson.loads, storage.whole_lines(bench.folder / "ledger.jsonl"))
    }
    assert [digests[ticket] for ticket in (3, 4)] == refusals(bench.folder)[0]["digests"]


async def test_several_skipped_steps_in_a_row_stop_the_run(bench: Bench):
    bench.on_nonfinite, bench.max_staleness, bench.max_steps = "skip", 9, 9
    bench.backend.spoiling = set(range(3, 99))
    bench.feed(*range(1, 21))
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "refused")
    await stopped(running)
    assert [r["action"] for r in refusals(bench.folder)] == ["skip", "skip", "stop"]
    assert set(ends(bench.folder)) == set(range(1, 7))


async def test_a_refusal_that_cannot_be_written_waits_and_counts_nowhere(bench: Bench):
    bench.on_nonfinite, bench.backend.spoiling, bench.interval, bench.max_staleness = "skip", {3}, 2, 9
    (bench.folder / "refused").write_bytes(b"a file in its place")
    bench.feed(1, 2, 3, 4)
    with pytest.raises(FileExistsError):
        await bench.run_to_the_end()
    assert [event for event in bench.events if event.startswith(("save", "commit"))] == [
        "save e000001-s000000",
        "commit version=1 tickets=[1, 2] void=0 ledger=2",
    ]


async def test_a_warm_start_that_is_not_finite_stops_visibly(bench: Bench):
    def fail(*_: object) -> None:
        raise NonFinite("the warm start was refused at its step 3: loss not finite", "lower its learning rate")

    bench.backend.build = fail  # type: ignore[method-assign]
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "refused")
    assert "warm start was refused at its step 3" in str(bench.status.not_ready())
    await stopped(running)
    assert bench.status.phase == "stopped"


def test_a_refusal_may_be_kept_again_after_an_error_in_the_middle(tmp_path: Path):
    folder = small_run.make(tmp_path / "r")
    made = WeightVersion(2, 3)
    from services.trainer.loop.refusals import RefusedStep

    refusal = RefusedStep(str(made), "e000002-s000002", 3, ("loss",), (7, 8), ("", ""), "stop")
    Refusals(folder).keep(refusal)
    Refusals(folder).keep(refusal)
    assert len(archive.refused(folder / "refused")) == 1
    assert len(refusals(folder)) == 2


async def _skipping(trainer: Incarnation) -> None:
    at = WeightVersion(1, 0)
    trainer.feed(1, 2, version=at)
    trainer.queue.entries += [small_run.group(ticket, at, reward=2 * small_run.HUGE) for ticket in (3, 4)]
    trainer.feed(5, 6, version=at)
    await trainer.until(lambda status: status.durable_step == 2)


def test_a_run_with_a_skipped_step_is_proven_and_one_whose_refused_groups_are_gone_is_not(tmp_path: Path):
    folder = small_run.write_config(tmp_path / small_run.RUN)
    with claimed(load([folder / "config.yaml"])), ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor, on_nonfinite="skip").run(_skipping))
    result = command.verify(RunFolder(folder))
    assert result["ok"], result["violations"]
    assert result["by_disposition"] == {"trained": 4, "nonfinite": 2}
    (_, path), *_ = archive.refused(folder / "refused")
    path.unlink()
    found = command.verify(RunFolder(folder))["violations"]
    assert {(v["kind"], v["ticket"]) for v in found} == {("archive", None), ("archive", 3), ("archive", 4)}
