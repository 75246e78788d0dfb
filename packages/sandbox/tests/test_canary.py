"""Verdicts on versions: failures are counted against the episodes that reached the failing turn."""

from __future__ import annotations

import random
from itertools import count

import pytest

from services.env.episode_slots import EpisodeCall
from shared.errors import SandboxFailed
from shared.failure_rates import tail
from volley_sandbox.submissions.canary import MAX_EPISODES, MIN_EPISODES, LiveRecord

NUMBERS = count()


def played(record: LiveRecord, n: int, n_turns: int, fails: bool = False) -> None:
    """Adds `n` episodes of `n_turns` turns, of which the last one fails if `fails`."""
    for _ in range(n):
        sample = ("train", next(NUMBERS), 0)
        for turn in range(n_turns + 1):
            failure = SandboxFailed("KeyError: lost") if fails and turn == n_turns else None
            record.called(EpisodeCall("late@1", sample, turn, 0.01, failure))
        record.ended()


def test_a_turn_that_fails_whenever_it_is_reached_rejects_however_many_never_reach_it() -> None:
    record = LiveRecord()
    played(record, 48, 1)
    played(record, 2, 3, fails=True)
    assert record.verdict is not None
    good, why = record.verdict
    assert (good, "at turn 3, 2 of the 2 attempts that reached it failed" in why) == (False, True)


def test_a_version_that_never_fails_is_promoted_after_few_episodes() -> None:
    record = LiveRecord()
    played(record, MIN_EPISODES - 1, 3)
    assert record.verdict is None
    played(record, 1, 3)
    assert record.verdict is not None
    assert record.verdict[0]


def test_one_failure_has_to_be_outweighed_at_its_turn() -> None:
    record = LiveRecord()
    played(record, 1, 2, fails=True)
    played(record, 30, 1)
    assert record.verdict is None, "turn 2 has been survived by nobody"
    played(record, 18, 2)
    assert record.verdict is None
    played(record, 1, 2)
    assert record.verdict is not None
    assert record.verdict[0]


def test_a_failure_that_nothing_outweighs_rejects_in_the_end() -> None:
    record = LiveRecord()
    played(record, 1, 3, fails=True)
    played(record, MAX_EPISODES - 1, 1)
    assert record.verdict is not None
    good, why = record.verdict
    assert (good, "too few to clear it" in why) == (False, True)


def test_a_turn_that_few_reach_delays_the_promotion_and_is_named() -> None:
    record = LiveRecord()
    played(record, 2, 3)
    played(record, MAX_EPISODES - 3, 1)
    assert record.verdict is None
    played(record, 1, 1)
    assert record.verdict is not None
    good, why = record.verdict
    assert (good, f"fewer than {MIN_EPISODES} reached turn 2" in why) == (True, True)


def test_many_turns_that_fail_seldom_are_seen_together() -> None:
    record = LiveRecord()
    for turn in range(1, 11):
        played(record, 2, turn, fails=True)
        played(record, 5, 10)
    assert record.trouble is not None
    assert "20 of 70 in all" in record.trouble


def test_a_promoted_version_is_compared_with_the_one_before() -> None:
    before, after = LiveRecord(), LiveRecord()
    played(before, 80, 1)
    played(before, 20, 1, fails=True)
    played(after, 80, 1)
    played(after, 20, 1, fails=True)
    assert after.regression(None) is not None
    assert after.regression(before) is None, "it fails no more often than before"


def test_a_version_that_always_failed_or_hardly_ran_excuses_nothing() -> None:
    broken, single, after = LiveRecord(), LiveRecord(), LiveRecord()
    played(broken, 50, 1, fails=True)
    played(single, 1, 1, fails=True)
    played(after, 20, 1, fails=True)
    assert after.regression(broken) is not None
    assert after.regression(single) is not None


def test_failures_long_after_the_promotion_roll_nothing_back() -> None:
    record = LiveRecord(n_ended=5000)
    played(record, 50, 1, fails=True)
    assert record.regression(None) is None
    assert record.trouble is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_fails_once_in_a_hundred_is_promoted_and_stays(seed: int) -> None:
    rng, record = random.Random(seed), LiveRecord()
    while record.verdict is None:
        played(record, 1, 2, fails=rng.random() < 0.01)
    assert record.verdict[0] or record.rates.n_failed > 1
    for _ in range(600):
        played(record, 1, 2, fails=rng.random() < 0.01)
        assert record.regression(None) is None


def test_the_tail_of_a_binomial_distribution() -> None:
    assert tail(2, 2, 0.05) == pytest.approx(0.0025)
    assert tail(8, 3, 0.05) == pytest.approx(0.005788, rel=1e-3)
    assert tail(10, 0, 0.05) == 1.0
    assert tail(1000, 100, 0.05) < 1e-9
