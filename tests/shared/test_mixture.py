"""Which environment a ticket plays: exact shares, dense ordinals, nothing but the lines decides."""

from collections import Counter
from fractions import Fraction

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DecodeError
from shared.run.mixture import Drawn, MixtureChange, SplitSizes, TicketAssignment, parse, replayed, whole_weights

NAMES = st.sampled_from(["adder@1", "adder@2", "frozen_lake", "gsm8k", "sokoban", "tetris"])
WEIGHTS = st.dictionaries(NAMES, st.integers(1, 60), min_size=1)


@st.composite
def histories(draw):
    """A configured mixture and changes in ascending order, some from the same ticket."""
    changes, ticket = [], 1
    for _ in range(draw(st.integers(0, 4))):
        ticket += draw(st.integers(0, 40))
        first = tuple(draw(st.lists(NAMES, unique=True, max_size=3)))
        changes.append(MixtureChange(ticket, draw(WEIGHTS), first))
    return draw(WEIGHTS), changes


def assigned(weights, changes):
    found = TicketAssignment(weights)
    for change in changes:
        found.add(change)
    return found


@given(weights=WEIGHTS)
@settings(max_examples=70, deadline=None)
def test_every_prefix_has_the_shares_to_less_than_one_group(weights):
    found, counts, total = TicketAssignment(weights), Counter(), sum(weights.values())
    for ticket in range(1, 400):
        counts[found.of(ticket).env] += 1
        assert all(abs(counts[env] - Fraction(ticket * weight, total)) < 1 for env, weight in weights.items())


@given(history=histories())
@settings(max_examples=70, deadline=None)
def test_every_segment_has_its_shares_after_what_plays_first(history):
    weights, changes = history
    found = assigned(weights, changes)
    whole = [MixtureChange(1, weights), *changes]
    for change, following in zip(
        whole, [*changes, MixtureChange(whole[-1].from_ticket + 80, {"gsm8k": 1})], strict=True
    ):
        drawn = [found.of(ticket).env for ticket in range(change.from_ticket, following.from_ticket)]
        first, rest = drawn[: len(change.first)], drawn[len(change.first) :]
        assert tuple(first) == change.first[: len(first)]
        counts, total = Counter(), sum(change.weights.values())
        for k, env in enumerate(rest, 1):
            counts[env] += 1
            assert all(abs(counts[e] - Fraction(k * w, total)) < 1 for e, w in change.weights.items())


@given(history=histories())
@settings(max_examples=70, deadline=None)
def test_ordinals_are_dense_and_a_restart_equals_no_restart(history):
    weights, changes = history
    found, seen = TicketAssignment(weights), []
    for change, until in zip([None, *changes], [*(c.from_ticket for c in changes), 260], strict=True):
        if change is not None:
            found.add(change)  # after the tickets before it were looked up: as a run meets it
        seen += [found.of(ticket) for ticket in range(len(seen) + 1, until)]
    again = assigned(weights, changes)
    assert [again.of(ticket) for ticket in range(len(seen), 0, -1)][::-1] == seen
    for env in {drawn.env for drawn in seen}:
        ordinals = [drawn.ordinal for drawn in seen if drawn.env == env]
        assert ordinals == list(range(1, len(ordinals) + 1))


@given(history=histories())
@settings(max_examples=50, deadline=None)
def test_lines_that_are_read_back_are_those_that_were_written(history):
    weights, changes = history
    found = TicketAssignment(weights)
    assert replayed(found, [line for c in changes for line in c.encode().splitlines()]) == []
    again = assigned(weights, changes)
    assert [found.of(t) for t in range(1, 150)] == [again.of(t) for t in range(1, 150)]


def test_one_environment_has_the_ticket_as_its_ordinal():
    found = TicketAssignment({"frozen_lake": 7})
    assert [found.of(t) for t in (1, 2, 10**12)] == [Drawn("frozen_lake", t) for t in (1, 2, 10**12)]


def test_a_canary_comes_first_and_then_every_twentieth_time():
    found = assigned({"a": 1}, [MixtureChange(11, {"a": 19, "b@1": 1}, ("b@1",))])
    played = [t for t in range(1, 212) if found.of(t).env == "b@1"]
    assert played[0] == 11
    assert set(map(int.__sub__, played[2:], played[1:])) == {20}
    assert played[1] - played[0] <= 20


def test_great_weights_cost_no_memory():
    found = TicketAssignment({"a": 10**6 - 1, "b": 1})
    assert found.of(5).env == "a"
    found.add(MixtureChange(10, {"a": 3, "b": 2}))
    assert found.of(10**15).ordinal > 10**14


def test_a_line_says_all_that_is_needed():
    change = MixtureChange(
        9,
        {"a": 3, "b@2": 1},
        ("b@2",),
        {"b@2": SplitSizes(5, 0)},
        {"b": 1.5},
        {"c@1": "3 groups in a row failed"},
        "b@2 joined",
        17.25,
    )
    assert parse(change.encode()) == change
    assert change.shares() == {"a": 0.75, "b@2": 0.25}


@pytest.mark.parametrize(
    "wrong",
    [
        {"from_ticket": 0},
        {"from_ticket": "9"},
        {"weights": {}},
        {"weights": {"a": 0}},
        {"weights": {"a": 0.5}},
        {"weights": {"a": 10**7}},
        {"weights": {"": 1}},
        {"weights": [1]},
        {"first": [1]},
        {"sizes": {"a": [0, 1]}},
        {"chosen": {"a": -1}},
        {"chosen": {"a": float("1e9")}},
    ],
)
def test_what_is_no_line_of_a_mixture_is_refused(wrong):
    line = {"from_ticket": 3, "weights": {"a": 1}} | wrong
    with pytest.raises(DecodeError):
        parse(orjson.dumps(line))


def test_damaged_lines_are_left_out_and_told():
    found = TicketAssignment({"a": 1})
    good = MixtureChange(5, {"b": 1}).encode().strip()
    lines = [b"   ", b"{", good, MixtureChange(4, {"c": 1}).encode().strip(), b'{"from_ticket": 6}']
    assert len(replayed(found, lines)) == 3
    assert [found.of(t).env for t in (4, 5, 6)] == ["a", "b", "b"]


def test_whole_weights_keep_the_proportion():
    assert whole_weights({"a": Fraction("0.3"), "b": Fraction("0.1"), "c": Fraction(0)}) == {"a": 3, "b": 1}
    huge = whole_weights({"a": Fraction(1), "b": Fraction(1, 10**12)})
    assert huge == {"a": 10**4, "b": 1}
    assert whole_weights({}) == {}
