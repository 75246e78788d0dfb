"""Win rates beside the model of Bradley and Terry, whose likelihood scipy maximizes."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import rankdata

from volley_judges.standings import win_rates


def strengths(wins: np.ndarray) -> np.ndarray:
    """Maximum likelihood of results [n, n]; ties are half a win of each."""
    n = len(wins)
    counted = wins * (1 - np.eye(n))

    def loss(theta: np.ndarray) -> float:
        return float((counted * np.logaddexp(0, theta[None, :] - theta[:, None])).sum())

    return minimize(loss, np.zeros(n), method="BFGS", tol=1e-12).x


@pytest.mark.parametrize("seed", range(12))
def test_win_rates_order_answers_as_bradley_and_terry(seed: int) -> None:
    rng, n = np.random.default_rng(seed), 6
    true = rng.normal(size=n)
    chance = 1 / (1 + np.exp(true[None, :] - true[:, None]))
    drawn = rng.binomial(8, chance) / 8  # eight verdicts, so that nobody always wins
    wins = np.triu(drawn, 1)
    wins += np.tril(1 - wins.T, -1) + 0.5 * np.eye(n)
    wins = 0.05 + 0.9 * wins
    rates = np.array(win_rates(wins, range(n)))
    found = strengths(wins)
    # The maximum is where expected wins are the observed ones: the win rates are its sufficient statistic.
    expected = 1 / (1 + np.exp(found[None, :] - found[:, None]))
    assert (expected.sum(axis=1) - 0.5) / (n - 1) == pytest.approx(rates, abs=1e-4)
    assert rankdata(np.round(found, 3)).tolist() == rankdata(np.round(rates, 6)).tolist()
