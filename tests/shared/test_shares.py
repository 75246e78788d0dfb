"""Shares by weight, with least shares and canaries: exact fractions of the whole."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.run.shares import Member, exact, weights_of


def shares(members):
    weights = weights_of(members)
    return {name: Fraction(weight, sum(weights.values())) for name, weight in weights.items()}


def member(weight, least=0, canary=False):
    return Member(Fraction(weight), Fraction(least), canary)


def test_weights_alone_are_the_proportion():
    assert shares({"a": member(3), "b": member(1), "c": member(0)}) == {"a": Fraction(3, 4), "b": Fraction(1, 4)}


def test_a_least_share_holds_against_any_weight_and_the_others_keep_their_proportion():
    found = shares({"a": member(1, "0.4"), "b": member(60), "c": member(30)})
    assert found == {"a": Fraction(2, 5), "b": Fraction(2, 5), "c": Fraction(1, 5)}


def test_who_has_more_than_the_least_share_is_left_alone():
    assert shares({"a": member(3, "0.2"), "b": member(1)}) == {"a": Fraction(3, 4), "b": Fraction(1, 4)}


def test_raising_one_may_push_another_below_its_own():
    found = shares({"a": member(1, "0.5"), "b": member(40, "0.3"), "c": member(59)})
    assert found == {"a": Fraction(1, 2), "b": Fraction(3, 10), "c": Fraction(1, 5)}


@pytest.mark.parametrize(("n", "each"), [(1, "1/20"), (4, "1/20"), (5, "1/25"), (10, "1/50")])
def test_canaries_have_a_twentieth_each_and_a_fifth_together(n, each):
    found = shares({"a": member(2, "0.5"), "b": member(1)} | {f"c{i}": member(7, canary=True) for i in range(n)})
    assert {found[f"c{i}"] for i in range(n)} == {Fraction(each)}
    assert found["a"] == Fraction(2, 3) * (1 - n * Fraction(each))


def test_canaries_alone_share_everything():
    assert weights_of({"a": member(5, canary=True), "b": member(1, canary=True)}) == {"a": 1, "b": 1}


def test_least_shares_that_canaries_leave_no_room_for_shrink_together():
    found = shares({"a": member(1, "0.5"), "b": member(1, "0.5"), "c": member(1, canary=True)})
    assert found == {"a": Fraction(19, 40), "b": Fraction(19, 40), "c": Fraction(1, 20)}


LEAST = st.fractions(0, Fraction(1, 6), max_denominator=100)
MEMBERS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Member, st.fractions(Fraction(1, 100), 100, max_denominator=100), LEAST, st.booleans()),
    min_size=1,
)


@given(members=MEMBERS)
@settings(max_examples=100, deadline=None)
def test_everybody_has_at_least_the_least_share_and_all_shares_are_one(members):
    found = shares(members)
    assert sum(found.values()) == 1
    canaries = sum(one.canary for one in members.values())
    room = 1 if canaries in (0, len(members)) else 1 - min(Fraction(1, 5), canaries * Fraction(1, 20))
    least = sum(one.min_share for one in members.values() if not one.canary)
    fit = min(1, room / least) if least else 1
    for name, one in members.items():
        if not one.canary:
            assert found[name] >= one.min_share * fit - Fraction(1, 10**3)  # shares are parts of ten thousand


def test_weights_are_taken_as_they_are_written():
    assert exact(0.1) == Fraction(1, 10)
    assert exact(2) == 2
    for wrong in (True, -1, "1", None, float("nan"), float("inf"), 10**7):
        with pytest.raises((ValueError, TypeError)):
            exact(wrong)
