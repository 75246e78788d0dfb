"""What a crash leaves between two checkpoints is made again from the log, step by step; and what cannot be is undone,
and its groups are in the queue again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.trainer.status import TrainerStatus
from shared import config
from shared.errors import ConfigError, NonFinite
from shared.run import archive, commits, ledger, pinned
from shared.run.pinned import Flat
from shared.schema import RunConfig
from shared.types import WeightVersion
from tests.trainer.fakes import Bench, stopped

RATE = "trainer.optimizer_config.learning_rate"
CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"env": "e"}})
SETTINGS = pinned.relevant(CONFIG)
E1 = [WeightVersion(1, step) for step in range(9)]


async def crashed_after(bench: Bench, step: int) -> None:
    """A run whose trainer ends so, with its first checkpoint alone."""
    bench.interval, bench.max_staleness, bench.max_steps = 99, 9, 9
    bench.status = TrainerStatus("r", 9)
    bench.feed(*range(1, 2 * step + 1))
    await crash(bench, 2 * step)


async def crash(bench: Bench, n_trained: int) -> None:
    """The trainer ends once it has trained so many tickets, and its stop makes no checkpoint."""
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.tickets.get("trained") == n_trained)
    bench.backend.full = 10**6
    await stopped(running)
    bench.backend.full, bench.status = 0, TrainerStatus("r", 9)
    bench.events.clear()


async def run_until_step(bench: Bench, step: int) -> None:
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.durable_step == step or running.done())
    await stopped(running)


def trained(bench: Bench) -> dict[int, tuple[int, int]]:
    """Epoch and step of every trained ticket."""
    settled = bench.ledger.settled().items()
    return {t: (line["epoch"], line["step"]) for t, line in settled if line["disposition"] == ledger.TRAINED}


async def test_the_log_is_trained_again_and_nothing_is_undone(bench: Bench):
    await crashed_after(bench, 3)
    bench.feed(7, 8, version="e000001-s000003")
    await run_until_step(bench, 4)
    steps = [event for event in bench.events if event.startswith(("build", "step", "begin", "save", "put back"))]
    assert steps == [
        "build",
        *(f"step {tickets}" for tickets in ([1, 2], [3, 4], [5, 6])),
        "begin low=6 version=3 issued=6 void=0 done=[]",
        "step [7, 8]",
        "save e000002-s000004",
    ]
    assert trained(bench) == {t: (1, (t + 1) // 2) for t in range(1, 7)} | {7: (2, 4), 8: (2, 4)}
    assert bench.backend.weights == list(range(1, 9))
    assert not any("rollback" in line for line in bench.ledger.read())
    assert bench.status.branched is None


async def test_a_second_crash_goes_through_the_log_of_both_epochs(bench: Bench):
    await crashed_after(bench, 2)
    bench.feed(5, 6, version="e000001-s000002")
    await crash(bench, 2)
    bench.backend.checkpoint = bench.backend.states[E1[0]]  # the one of the second epoch is damaged
    bench.feed(7, 8, version="e000002-s000003")
    await run_until_step(bench, 4)
    assert bench.backend.weights == list(range(1, 9))
    assert trained(bench)[8] == (3, 4)
    assert not any("rollback" in line for line in bench.ledger.read())


def differ_from(bench: Bench, ticket: int) -> None:
    """From this ticket on another backend computes other bits."""
    checksum = bench.backend.checksum
    bench.backend.checksum = lambda: checksum() + (" otherwise" if ticket in bench.backend.weights else "")


async def test_where_the_bits_differ_the_lineage_branches_and_the_groups_are_in_the_queue_again(bench: Bench):
    await crashed_after(bench, 3)
    differ_from(bench, 4)
    await run_until_step(bench, 3)
    steps = [event for event in bench.events if event.startswith(("build", "step", "begin", "save", "put back"))]
    assert steps[:12] == [
        "build",
        "step [1, 2]",
        "step [3, 4]",
        "build",
        "step [1, 2]",
        "begin low=2 version=1 issued=6 void=0 done=[]",
        *(f"put back {ticket}" for ticket in (3, 4, 5, 6)),
        "step [3, 4]",
        "step [5, 6]",
    ]
    assert trained(bench) == {1: (1, 1), 2: (1, 1), 3: (2, 2), 4: (2, 2), 5: (2, 3), 6: (2, 3)}
    assert bench.status.branched is not None
    assert "e000001-s000002" in bench.status.branched
    record = commits.read(bench.archive.root, WeightVersion(2, 3))
    assert record.state.lineage == ((1, 0), (2, 1))


async def test_groups_that_undone_weights_sampled_are_superseded(bench: Bench):
    bench.interval, bench.max_staleness, bench.max_steps = 99, 9, 9
    bench.status = TrainerStatus("r", 9)
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.tickets.get("trained") == 2)
    bench.feed(3, 4, version="e000001-s000001")
    await bench.until(lambda: bench.status.tickets.get("trained") == 4)
    bench.backend.full = 10**6
    await stopped(running)
    bench.backend.full, bench.status = 0, TrainerStatus("r", 9)
    differ_from(bench, 1)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.tickets.get("superseded") == 2)
    await stopped(running)
    assert trained(bench) == {1: (2, 1), 2: (2, 1)}


async def test_a_logged_step_whose_groups_cannot_be_read_ends_the_log(bench: Bench):
    await crashed_after(bench, 3)
    archive.path_of(bench.archive.root, E1[2]).write_bytes(b"")
    bench.feed(3, 4)
    await run_until_step(bench, 3)
    assert "begin low=2 version=1 issued=6 void=0 done=[]" in bench.events
    assert [event for event in bench.events if event.startswith("put back")] == ["put back 5", "put back 6"]
    assert sorted(trained(bench)) == [1, 2, 3, 4, 5, 6]


async def test_a_logged_step_that_is_not_finite_now_ends_the_log(bench: Bench):
    await crashed_after(bench, 2)
    step, began = bench.backend.step, bench.queue.began

    def once(held: Any, before: WeightVersion) -> Any:
        if before.step == 1 and bench.queue.began == began:
            raise NonFinite("not finite", what=["loss"])
        return step(held, before)

    bench.backend.step = once
    await run_until_step(bench, 2)
    assert trained(bench) == {1: (1, 1), 2: (1, 1), 3: (2, 2), 4: (2, 2)}


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed"])
async def test_a_damaged_newest_record_is_a_branch_and_its_groups_are_in_the_queue_again(bench: Bench, damage: str):
    await crashed_after(bench, 3)
    path = commits.path_of(bench.archive.root, E1[3])
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.unlink() if damage == "removed" else path.write_bytes(b"" if damage == "cut" else text)
    bench.feed(7, 8, version="e000001-s000002")
    await run_until_step(bench, 4)
    assert bench.events.index("begin low=4 version=2 issued=6 void=0 done=[]") < bench.events.index("put back 5")
    assert [event for event in bench.events if event.startswith("put back")] == ["put back 5", "put back 6"]
    assert bench.status.branched is not None
    assert "e000001-s000003" in bench.status.branched
    assert sorted(trained(bench)) == list(range(1, 9)) == sorted(bench.backend.weights)
    assert {t: at for t, at in trained(bench).items() if t < 5} == {1: (1, 1), 2: (1, 1), 3: (1, 2), 4: (1, 2)}


async def test_what_was_undone_for_a_damaged_record_is_told_once(bench: Bench):
    await crashed_after(bench, 3)
    commits.path_of(bench.archive.root, E1[3]).write_bytes(b"{}")
    await run_until_step(bench, 3)
    bench.status = TrainerStatus("r", 9)
    bench.events.clear()
    bench.feed(7, 8, version="e000002-s000003")
    await run_until_step(bench, 4)
    assert bench.status.branched is None
    assert not any(event.startswith("put back") for event in bench.events)
    assert sorted(trained(bench)) == list(range(1, 9))


async def test_a_missing_record_between_others_is_not_needed(bench: Bench):
    await crashed_after(bench, 3)
    commits.path_of(bench.archive.root, E1[2]).unlink()
    bench.feed(7, 8, version="e000001-s000003")
    await run_until_step(bench, 4)
    assert trained(bench) == {t: (1, (t + 1) // 2) for t in range(1, 7)} | {7: (2, 4), 8: (2, 4)}


async def test_logged_steps_are_trained_under_the_settings_they_were_made_with(bench: Bench):
    """Two epochs under different ones, then a third."""
    put_in_force(bench)
    bench.settings = {**SETTINGS, RATE: 1.0}
    await crashed_after(bench, 2)
    bench.settings = {**SETTINGS, RATE: 2.0}
    bench.feed(5, 6, version="e000001-s000002")
    await crash(bench, 2)
    bench.settings = {**SETTINGS, RATE: 3.0}
    bench.backend.checkpoint = bench.backend.states[E1[0]]
    bench.feed(7, 8, version="e000002-s000003")
    await run_until_step(bench, 4)
    steps = [event for event in bench.events if event.startswith(("under", "step"))]
    assert steps == [
        *("under 1.0", "step [1, 2]", "under 1.0", "step [3, 4]", "under 2.0", "step [5, 6]"),
        *("under 3.0", "step [7, 8]"),
    ]
    assert bench.status.branched is None
    assert not any("rollback" in line for line in bench.ledger.read())
    state = commits.read(bench.archive.root, WeightVersion(3, 4)).state
    assert state.settings[1:] == ((2, {RATE: 2.0}), (3, {RATE: 3.0}))
    assert state.lineage == ((1, 0), (2, 2), (3, 3))
    assert bench.queue.told == (state.lineage, "anew")


async def test_settings_that_cannot_be_put_in_force_again_branch_the_lineage(bench: Bench):
    put_in_force(bench)
    bench.settings = {**SETTINGS, RATE: 1.0}
    await crashed_after(bench, 2)
    bench.settings = {**SETTINGS, RATE: 2.0}
    apply_settings = bench.backend.apply_settings

    def refusing(settings: Flat) -> None:
        if settings[RATE] == 1.0:
            raise ConfigError("there is no such rate any more")
        apply_settings(settings)

    bench.backend.apply_settings = refusing
    await run_until_step(bench, 2)
    assert "no such rate" in (bench.status.branched or "")
    assert trained(bench) == {1: (2, 1), 2: (2, 1), 3: (2, 2), 4: (2, 2)}


async def test_steps_of_an_earlier_version_are_trained_again_without_a_removed_key(bench: Bench):
    """Every run recorded the key with its default."""

    def put(settings: Flat) -> None:
        bench.events.append(f"under {config.apply_settings(CONFIG, settings).mode}")

    bench.backend.apply_settings = put
    bench.settings = {**SETTINGS, "orchestrator.generation.filters.custom": []}
    await crashed_after(bench, 2)
    bench.settings = SETTINGS
    bench.feed(5, 6, version="e000001-s000002")
    await run_until_step(bench, 3)
    assert bench.status.branched is None
    assert trained(bench) == {1: (1, 1), 2: (1, 1), 3: (1, 2), 4: (1, 2), 5: (2, 3), 6: (2, 3)}
    assert bench.events.count("under rl") >= 3


async def test_a_setting_that_this_version_lacks_undoes_no_step(bench: Bench):
    custom = "orchestrator.generation.filters.custom"
    bench.settings = {**SETTINGS, custom: ["my.rules:keeps"]}
    put_in_force(bench)
    bench.settings[RATE] = 1.0
    await crashed_after(bench, 2)
    bench.settings = {**SETTINGS, RATE: 1.0}
    with pytest.raises(ConfigError, match=r"trainer\.filters\.custom replaced it"):
        await run_until_step(bench, 2)
    assert not any("rollback" in line for line in bench.ledger.read())


def put_in_force(bench: Bench) -> None:
    """The events tell of it."""
    bench.backend.apply_settings = lambda settings: bench.events.append(f"under {settings[RATE]}")


async def test_a_run_without_records_is_taken_up_from_its_checkpoint(bench: Bench):
    await crashed_after(bench, 2)
    for version in commits.versions(bench.archive.root):
        commits.path_of(bench.archive.root, version).unlink()
    bench.feed(1, 2, 3, 4)
    await run_until_step(bench, 2)
    assert "begin low=0 version=0 issued=0 void=0 done=[]" in bench.events
    assert trained(bench) == {1: (2, 1), 2: (2, 1), 3: (2, 2), 4: (2, 2)}


async def test_what_an_older_trainer_logged_meanwhile_is_trained_too(bench: Bench):
    """It commits its last step while the new one begins, and is fenced by that."""
    await crashed_after(bench, 2)
    begin = bench.queue.begin
    path = commits.path_of(bench.archive.root, E1[2])
    hidden = path.read_bytes()
    path.unlink()

    async def meanwhile(*args: Any) -> int:
        path.write_bytes(hidden)
        return await begin(*args)

    bench.queue.begin = meanwhile
    bench.feed(5, 6, version="e000001-s000002")
    await run_until_step(bench, 3)
    assert trained(bench) == {1: (1, 1), 2: (1, 1), 3: (1, 2), 4: (1, 2), 5: (3, 3), 6: (3, 3)}
