"""The order of a hand-over, and how the loop waits and fails; with a model and a queue that note what they are told."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from services.trainer.metrics import prometheus
from services.trainer.status import TrainerStatus
from shared.errors import Fenced, WeightsError
from shared.process import sinks
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.process.telemetry import REGISTRY
from shared.run import archive, ledger
from shared.run.archive import Archive
from shared.run.progress import TicketProgress
from shared.run.state import initial_state
from shared.types import Group, WeightVersion
from tests.support.sinks import KeepingSink, raising
from tests.trainer.fakes import Bench, stopped
from tests.trainer.support import group


async def test_recorded_then_ledger_then_commit_then_publish_then_saved(bench: Bench):
    bench.max_steps = 1
    bench.status = TrainerStatus("r", 1)
    bench.feed(1, 2)
    await bench.run_to_the_end()
    assert bench.events == [
        "build",
        "warm start",
        "begin low=0 version=0 issued=0 void=0 done=[]",
        "open",
        "save e000001-s000000",
        "publish e000001-s000000",
        "step [1, 2]",
        "commit version=1 tickets=[1, 2] void=0 ledger=2",
        "publish e000001-s000001",
        "save e000001-s000001",
        "leave",
    ]
    assert bench.status.phase == "stopped"
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.phase == "done"


async def test_trained_groups_are_archived_in_the_order_of_the_step_and_named_by_digest(bench: Bench):
    bench.feed(2, 1, 4, 3)
    await bench.run_to_the_end()
    lines = [line for line in map(ledger.parse, (bench.folder / "ledger.jsonl").read_bytes().splitlines()) if line]
    for step, tickets in ((1, [2, 1]), (2, [4, 3])):
        payloads = list(archive.read(bench.folder / "archive", "r", WeightVersion(1, step)))
        assert payloads == [group(ticket, "e000001-s000000").encode() for ticket in tickets]
        assert [archive.digest(x) for x in payloads] == [line["digest"] for line in lines if line["step"] == step]


async def test_a_longer_interval_saves_at_its_end_and_at_the_last_step(bench: Bench):
    bench.max_steps, bench.interval, bench.max_staleness = 3, 2, 9
    bench.status = TrainerStatus("r", 3)
    bench.feed(1, 2, 3, 4, 5, 6)
    await bench.run_to_the_end()
    saves, commits = ([e for e in bench.events if e.startswith(kind)] for kind in ("save", "commit"))
    assert saves == [f"save e000001-s00000{step}" for step in (0, 2, 3)]
    assert commits == [f"commit version={n} tickets={[2 * n - 1, 2 * n]} void=0 ledger={2 * n}" for n in (1, 2, 3)]
    at = bench.events.index
    assert at(saves[0]) < at(commits[0])
    assert at(commits[1]) < at(saves[1])  # which is written while the third step is made
    assert at(commits[2]) < at(saves[2])


async def test_stale_groups_are_void_and_make_room_at_once(bench: Bench):
    bench.max_staleness = 0
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.tickets.get("stale") == 2)
    bench.feed(5, 6, version="e000001-s000001")
    await bench.until(lambda: bench.status.phase == "done")
    await stopped(running)
    assert "commit version=1 tickets=[3, 4] void=2 ledger=4" in bench.events
    assert "commit version=2 tickets=[5, 6] void=2 ledger=6" in bench.events


async def test_the_queue_may_be_away_for_a_while(bench: Bench):
    bench.queue.away = 2
    bench.feed(1, 2, 3, 4)
    await bench.run_to_the_end()
    assert bench.status.step == 2


async def test_a_disk_that_is_full_while_older_trainers_are_shut_out_costs_no_epoch(bench: Bench):
    bench.backend.full_at_fence = 2
    bench.feed(1, 2, 3, 4)
    await bench.run_to_the_end()
    assert sum(event.startswith("begin") for event in bench.backend.events) == 1
    assert (bench.status.step, bench.status.epoch) == (2, 1)


async def test_a_fenced_trainer_ends_with_that_one_error(bench: Bench):
    bench.queue.fenced_after = 1
    bench.feed(1, 2)
    with pytest.raises(Fenced, match="epoch 1 was replaced"):
        await bench.run_to_the_end()


async def test_checkpoints_that_are_all_damaged_end_the_run(bench: Bench):
    bench.backend.broken = True
    with pytest.raises(WeightsError):
        await bench.run_to_the_end()


async def test_a_new_incarnation_continues_and_remembers_void_tickets(bench: Bench):
    bench.feed(1, 2)
    first = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.durable_step == 1)
    bench.queue.put(Group(4, "toy", "t", (), failure="Timeout"))
    await bench.until(lambda: bench.status.tickets.get("failed") == 1)
    await stopped(first)
    bench.events.clear()
    bench.status = TrainerStatus("r", 2)
    bench.feed(3, 5, version="e000002-s000001")
    await bench.run_to_the_end()
    assert bench.events[1] == "begin low=2 version=1 issued=4 void=1 done=[4]"
    assert "commit version=2 tickets=[3, 5] void=1 ledger=5" in bench.events


async def test_pause_holds_the_next_step_and_resume_lets_it_go(bench: Bench):
    bench.status.ask(pause=True)
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "paused" and bench.status.waiting_groups == 4)
    assert bench.status.step == 0
    bench.status.ask(pause=False)
    await bench.until(lambda: bench.status.step == 2)
    await stopped(running)


async def test_a_wanted_checkpoint_comes_while_groups_are_missing(bench: Bench):
    bench.interval, bench.max_staleness = 9, 9
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "waiting" and bench.status.step == 1)
    bench.status.ask(checkpoint=True)
    await bench.until(lambda: bench.status.durable_step == 1)
    await stopped(running)


async def test_what_is_held_is_bounded_and_the_rest_stays_in_the_queue(bench: Bench):
    bench.max_steps = 10
    bench.status = TrainerStatus("r", 10)
    bench.max_staleness = 9
    bench.feed(*range(1, 101))
    bench.status.ask(pause=True)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.waiting_groups == 20 and bench.queue.attended)
    assert len(bench.queue.entries) == 80
    bench.status.ask(pause=False)
    await bench.until(lambda: bench.status.phase == "done")
    await stopped(running)


async def test_a_missing_ticket_is_read_beyond_the_bound(bench: Bench):
    bench.order = "ticket"
    bench.feed(*range(2, 40), 1)
    await bench.run_to_the_end()
    assert [event for event in bench.events if event.startswith("step")] == ["step [1, 2]", "step [3, 4]"]


async def test_after_the_last_step_the_queue_is_attended_to(bench: Bench):
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "done")
    bench.queue.fenced_after = 0
    with pytest.raises(Fenced):
        await asyncio.wait_for(running, 60)


async def test_a_trainer_that_wakes_up_after_a_step_and_was_replaced_adds_nothing_to_the_metrics(bench: Bench):
    """The queue has not told it yet, and would only at the next commit. The first hand-over is on record by then: it
    looks, too.
    """
    bench.backend.during_step = lambda: Archive(bench.folder / "archive", "r").claim(2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until_handed_over()
    bench.feed(1, 2)
    with pytest.raises(Fenced, match="another trainer of the run"):
        await asyncio.wait_for(running, 60)
    assert "step [1, 2]" in bench.events
    assert (bench.folder / "metrics.jsonl").read_bytes() == b""


def a_hung_sink() -> KeepingSink:
    return KeepingSink("hung", lambda line: threading.Event().wait(60))


@pytest.mark.parametrize("bad", [a_hung_sink, lambda: KeepingSink("bad", raising(OSError("away")))])
async def test_sinks_get_the_lines_of_the_file_and_stop_nothing(
    bench: Bench, bad: Callable[[], KeepingSink], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.2)
    kept = KeepingSink()
    with MetricsFanout.opened([bad(), kept]) as bench.sinks:
        bench.feed(1, 2, 3, 4)
        await bench.run_to_the_end()
        await bench.until(lambda: len(kept.lines) == 2)
    assert bench.status.phase == "stopped"
    lines = [orjson.loads(line) for line in (bench.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert kept.lines == [("step", line) for line in lines]


async def test_sinks_get_no_line_that_the_file_refuses(bench: Bench):
    bench.backend.during_step = lambda: Archive(bench.folder / "archive", "r").claim(2)
    kept = KeepingSink()
    with MetricsFanout.opened([kept]) as bench.sinks:
        running = asyncio.ensure_future(bench.worker().run())
        await bench.until_handed_over()
        bench.feed(1, 2)
        with pytest.raises(Fenced):
            await asyncio.wait_for(running, 60)
    assert kept.lines == []


async def test_prometheus_shows_the_line_of_the_last_step(bench: Bench):
    def shown(name: str) -> float:
        return REGISTRY.get_sample_value(f"volley_trainer_{name}") or 0.0

    tokens = shown("tokens_total")
    with MetricsFanout.opened([PrometheusSink(prometheus.show)]) as bench.sinks:
        bench.feed(1, 2, 3, 4)
        await bench.run_to_the_end()
    lines = [orjson.loads(line) for line in (bench.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert shown("step") == 2
    assert shown("epoch") == 1
    assert shown("tokens_total") - tokens == sum(line["tokens"] for line in lines)
    for name in ("loss", "reward_mean", "staleness_max", "zero_variance_groups", "logprob_abs_diff_current"):
        value = lines[-1][name]
        assert math.isnan(shown(name)) if value is None else shown(name) == value, name
    assert math.isnan(shown("routing_diff"))


async def test_the_queue_opens_only_when_no_older_trainer_has_made_a_newer_checkpoint(bench: Bench):
    bench.max_steps = 1
    bench.status = TrainerStatus("r", 1)
    bench.feed(1, 2)
    await bench.run_to_the_end()
    bench.events.clear()
    bench.max_steps, bench.status, begin = 3, TrainerStatus("r", 3), bench.queue.begin
    done = bench.backend.checkpoint
    assert done is not None

    async def late(*args: Any) -> int:
        """Fenced by this, the older trainer has just made step 2 durable."""
        epoch = await begin(*args)
        if bench.backend.checkpoint is done:
            newer = TicketProgress(4)
            bench.backend.checkpoint = done.at(2, newer, issued=4, done=False, chain=done.chain, metrics=done.metrics)
            bench.backend.kept[WeightVersion(1, 2)] = [1, 2, 3, 4]
        return epoch

    bench.queue.begin = late
    bench.feed(5, 6, version="e000001-s000002")
    await bench.run_to_the_end()
    assert bench.events[:5] == [
        "build",
        "begin low=2 version=1 issued=2 void=0 done=[]",
        "build",
        "begin low=4 version=2 issued=4 void=0 done=[]",
        "open",
    ]
    assert bench.backend.weights == [1, 2, 3, 4, 5, 6]


async def test_a_trainer_that_starts_from_nothing_looks_again_before_it_forgets_the_groups_of_another(bench: Bench):
    """Another one of the run was faster through its warm start."""
    build = bench.backend.build
    other = initial_state(0).starting_epoch(1, keep_reference=False)

    def slow_build() -> None:
        build()
        if bench.backend.checkpoint is None:
            bench.backend.checkpoint = other.at(
                1, TicketProgress(2), issued=4, done=False, chain=other.chain, metrics=other.metrics
            )
            bench.backend.kept[WeightVersion(1, 1)] = [1, 2]

    bench.backend.build = slow_build
    bench.feed(3, 4, version="e000001-s000001")
    await bench.run_to_the_end()
    begun = [event for event in bench.events if event.startswith("begin")]
    assert begun == ["begin low=2 version=1 issued=4 void=0 done=[]"]
    assert bench.backend.weights == [1, 2, 3, 4]


async def test_a_queue_that_has_nothing_is_asked_whether_it_is_still_ours(bench: Bench):
    bench.queue.fenced_after = 0
    with pytest.raises(Fenced):
        await asyncio.wait_for(bench.worker().run(), 60)


async def test_an_epoch_that_another_trainer_has_claimed_is_not_used(bench: Bench):
    Archive(bench.folder / "archive", "r").claim(4)
    bench.feed(1, 2, 3, 4, version="e000005-s000000")
    await bench.run_to_the_end()
    assert "save e000005-s000002" in bench.events


async def test_lines_that_were_kept_back_are_not_written_once_another_trainer_has_begun(bench: Bench):
    metrics, commit = bench.folder / "metrics.jsonl", bench.queue.commit

    def unwritable() -> None:
        metrics.unlink()
        metrics.mkdir()

    bench.backend.during_step = unwritable

    async def replaced(epoch: int, version: int, finished: Any, void: int) -> None:
        await commit(epoch, version, finished, void)
        if finished:
            metrics.rmdir()
            Archive(bench.folder / "archive", "r").claim(2)

    bench.queue.commit = replaced
    bench.feed(1, 2)
    with pytest.raises(Fenced, match="another trainer of the run"):
        await asyncio.wait_for(bench.worker().run(), 60)
    assert not metrics.exists()


async def test_a_long_reason_makes_a_line_that_every_reader_takes(bench: Bench):
    bench.queue.put(Group(1, "toy", "t", (), failure="\0" * 2**20))
    bench.feed(2, 3, 4, 5)
    await bench.run_to_the_end()
    assert bench.ledger.settled().keys() == {1, 2, 3, 4, 5}
    assert bench.ledger.settled()[1]["reason"] == "\0" * 1000
