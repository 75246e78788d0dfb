"""Scores from comparisons of n answers. Pure functions; a score is from 0 (worst) to 1 (best).

- *Win rate*: the mean result against each other answer, with 1 for a win, 1/2 for a tie. For a ranking it is Borda's
  count divided by n - 1. If every two answers are compared equally often, it orders them as the maximum likelihood of
  the model of Bradley and Terry (Zermelo 1929; Bradley and Terry 1952), which has no finite estimate for an answer that
  always wins.
- *Single elimination* with seeds, as ArenaRL (arXiv:2601.06487): the score is the share of rounds that were survived.
- A verdict counts if it is the same in both orders of the two answers, else it is a tie (MT-Bench, arXiv:2306.05685).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIN, TIE, LOSS = 1.0, 0.5, 0.0


def agreed(first: float, second: float) -> float:
    """Combine the results of one answer in both orders: a tie unless they agree."""
    return first if first == second else TIE


def wins_of_ranking(order: Sequence[int]) -> np.ndarray:
    """Return results float64 [n, n] of each answer against each other one. Args: order: the best answer first."""
    place = np.empty(len(order), np.int64)
    place[list(order)] = np.arange(len(order))
    wins = (place[:, None] < place[None, :]).astype(np.float64)
    np.fill_diagonal(wins, TIE)
    return wins


def win_rates(wins: np.ndarray, kinds: Sequence[int]) -> list[float]:
    """Return the win rates of n >= 2 episodes.

    Args:
        wins: float64 [k, k], results of k different answers against each other.
        kinds: the answer of each episode; episodes with one answer tie.
    """
    met = wins[np.ix_(kinds, kinds)]
    same = np.equal.outer(kinds, kinds)
    met[same] = TIE
    return ((met.sum(axis=1) - TIE) / (len(kinds) - 1)).tolist()


def bracket(n: int) -> list[int]:
    """Return the seeds 0 … size - 1 by place in the first round, size being the power of 2 from n on.

    Neighbours meet; seeds from n on are byes. The two best seeds can only meet in the final, the four best in the
    semifinals, and so on.
    """
    places = [0]
    while len(places) < n:
        last = 2 * len(places) - 1
        places = [seed for one in places for seed in (one, last - one)]
    return places


def n_rounds(n: int) -> int:
    """Return the number of rounds of a single elimination of n answers."""
    return (n - 1).bit_length()
