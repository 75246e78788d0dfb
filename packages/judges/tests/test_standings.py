"""Scores from verdicts: win rates, rankings, brackets."""

from itertools import permutations

import numpy as np
import pytest

from volley_judges.standings import LOSS, TIE, WIN, agreed, bracket, n_rounds, win_rates, wins_of_ranking


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [(WIN, WIN, WIN), (LOSS, LOSS, LOSS), (WIN, LOSS, TIE), (LOSS, WIN, TIE), (WIN, TIE, TIE), (TIE, TIE, TIE)],
)
def test_only_a_verdict_of_both_orders_counts(first: float, second: float, result: float) -> None:
    assert agreed(first, second) == result


def test_a_ranking_scores_by_places() -> None:
    assert win_rates(wins_of_ranking([2, 0, 3, 1]), [0, 1, 2, 3]) == pytest.approx([2 / 3, 0, 1, 1 / 3])


def test_equal_answers_tie_and_share_a_score() -> None:
    scores = win_rates(wins_of_ranking([1, 0]), [0, 1, 1, 0])
    assert scores == pytest.approx([1 / 6, 5 / 6, 5 / 6, 1 / 6])


@pytest.mark.parametrize("n", [2, 3, 7])
def test_win_rates_of_a_group_have_the_mean_of_a_tie(n: int) -> None:
    rng = np.random.default_rng(n)
    wins = np.triu(rng.choice([0.0, 0.5, 1.0], (n, n)), 1)
    wins += np.tril(1 - wins.T, -1) + TIE * np.eye(n)
    for kinds in ([*range(n)], [0, *range(n)]):
        assert np.mean(win_rates(wins, kinds)) == pytest.approx(TIE)


def test_every_order_of_three_is_scored_by_its_places() -> None:
    for order in permutations(range(3)):
        scores = win_rates(wins_of_ranking(order), [0, 1, 2])
        assert [scores[n] for n in order] == [1.0, 0.5, 0.0]


def test_a_bracket_is_that_of_tournaments() -> None:
    assert bracket(2) == [0, 1]
    assert bracket(8) == [0, 7, 3, 4, 1, 6, 2, 5]
    assert bracket(5) == bracket(8)
    assert [n_rounds(n) for n in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_the_best_seeds_meet_last(n: int) -> None:
    left = bracket(n)
    while len(left) > 1:
        assert sorted(left) == list(range(len(left)))
        assert all(one + other == len(left) - 1 for one, other in zip(left[::2], left[1::2], strict=True))
        left = [min(pair) for pair in zip(left[::2], left[1::2], strict=True)]
