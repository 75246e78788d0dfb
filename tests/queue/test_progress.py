"""`TicketProgress` against a plain set of tickets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.run.progress import TicketProgress

ENDS = st.lists(st.tuples(st.integers(1, 20), st.booleans()))


@given(ENDS)
def test_it_is_a_set_of_tickets(ends: list[tuple[int, bool]]):
    progress, plain = TicketProgress(), dict[int, bool]()
    for ticket, void in ends:
        assert progress.finish(ticket, void=void) == (ticket not in plain)
        plain.setdefault(ticket, void)
    assert [t for t in range(1, 25) if progress.is_finished(t)] == sorted(plain)
    assert (progress.void, progress.n_trained) == (sum(plain.values()), len(plain) - sum(plain.values()))
    assert progress.low + 1 not in progress.done
    assert all(ticket > progress.low for ticket in progress.done)


@given(ENDS, st.integers(0, 10))
def test_it_survives_a_checkpoint(ends: list[tuple[int, bool]], low: int):
    progress = TicketProgress(low, (ticket for ticket, _ in ends), void=3)
    again = TicketProgress(progress.low, sorted(progress.done), progress.void)
    assert (again.low, again.done, again.void) == (progress.low, progress.done, 3)
