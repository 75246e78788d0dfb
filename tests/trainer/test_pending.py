"""What is trained, saved and settled: one transition after the other, and what each leaves."""

from __future__ import annotations

from services.trainer.settlement.pending import PendingStep, PendingWork
from shared.queue.records import Finished
from shared.types import WeightVersion

START = PendingWork(WeightVersion(3, 4))


def step(number: int, *tickets: int) -> PendingStep:
    version = WeightVersion(3, number)
    lines = tuple({"ticket": ticket, "version": str(version)} for ticket in tickets)
    return PendingStep(version, tuple(Finished(t, f"{t}-0") for t in tickets), lines, {"step": number})


def test_trained_steps_wait_for_a_checkpoint_in_their_order():
    work = START.trained(step(5, 2, 1)).trained(step(6, 3))
    assert (work.version, work.durable, len(work.unsaved)) == (WeightVersion(3, 6), WeightVersion(3, 4), 2)
    assert [one.ticket for one in work.finished] == [2, 1, 3]
    assert [line["ticket"] for line in work.ledger] == [2, 1, 3]


def test_a_saved_step_waits_for_the_queue_and_is_not_saved_again():
    saved = START.trained(step(5, 1)).saved(WeightVersion(3, 5))
    assert (saved.version, saved.durable, saved.unsaved) == (WeightVersion(3, 5), WeightVersion(3, 5), ())
    assert [one.ticket for one in saved.finished] == [1]
    settled = saved.settled()
    assert (settled.version, settled.finished) == (WeightVersion(3, 5), [])


def test_lines_of_metrics_are_kept_until_their_file_holds_them():
    settled = START.trained(step(5, 1)).saved(WeightVersion(3, 5)).settled().trained(step(6, 2))
    assert [line["step"] for line in settled.metrics] == [5, 6]
    assert settled.flushed().metrics == ()


def test_a_change_is_unrecorded_until_just_this_one_is_recorded():
    work = START.changed((1, 2)).changed((3,))
    assert work.recorded((1, 2)).unrecorded == ((3,),)
    assert work.recorded((3,)).recorded((1, 2)) == START
