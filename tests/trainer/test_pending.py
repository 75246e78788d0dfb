"""What is trained, recorded and settled: one transition after the other, and what each leaves."""

from __future__ import annotations

from dataclasses import replace

from services.trainer.loop.pending import PendingWork
from shared.queue.records import Finished
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion

FIRST = replace(initial_state(0), epoch=3, step=4)
START = PendingWork(FIRST, FIRST.version)


def after(step: int) -> TrainerState:
    return replace(FIRST, step=step, metrics=tuple({"step": n} for n in range(5, step + 1)))


def finished(*tickets: int) -> tuple[Finished, ...]:
    return tuple(Finished(ticket, f"{ticket}-0") for ticket in tickets)


def test_recorded_steps_wait_for_the_queue_in_their_order():
    work = START.committed(after(5), finished(2, 1)).committed(after(6), finished(3))
    assert (work.version, work.saved, work.n_unsaved) == (WeightVersion(3, 6), WeightVersion(3, 4), 2)
    assert [one.ticket for one in work.finished] == [2, 1, 3]
    assert work.settled().finished == ()


def test_lines_of_metrics_are_kept_until_their_file_holds_them():
    work = START.committed(after(5), ()).committed(after(6), ())
    assert [line["step"] for line in work.metrics] == [5, 6]
    assert work.flushed().metrics == ()


def test_a_change_is_unrecorded_until_just_this_one_is_recorded():
    work = START.changed((1, 2)).changed((3,))
    assert work.recorded((1, 2)).unrecorded == ((3,),)
    assert work.recorded((3,)).recorded((1, 2)) == START
