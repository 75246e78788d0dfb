"""Optimal policy of an environment with a transition table, by value iteration.

Sutton and Barto 2018, section 4.4, over gymnasium's table `P[state][action] = [(probability, next state, reward, over),
…]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

type Transition = tuple[float, int, float, bool]
type Table = Mapping[int, Mapping[int, Sequence[Transition]]]

_DISCOUNT = 0.99
_MAX_SWEEPS = 1000
_PRECISION = 1e-6
_LONGEST_PATH = 200


class GreedyPolicy:
    """The greedy policy of the optimal values. Among equal actions it takes the first."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._values = dict.fromkeys(table, 0.0)
        for _ in range(_MAX_SWEEPS):
            change = 0.0
            for state, actions in table.items():
                best = max(self._worth(outcomes) for outcomes in actions.values())
                change = max(change, abs(best - self._values[state]))
                self._values[state] = best
            if change < _PRECISION:
                break

    def action(self, state: int) -> int:
        actions = self._table[state]
        return max(actions, key=lambda action: (round(self._worth(actions[action]), 5), -action))

    def path(self, state: int) -> list[int]:
        """Actions from `state` to the end, or through the first random outcome."""
        actions: list[int] = []
        while len(actions) < _LONGEST_PATH:
            actions.append(self.action(state))
            outcomes = [outcome for outcome in self._table[state][actions[-1]] if outcome[0] > 0]
            if len({outcome[1] for outcome in outcomes}) > 1 or outcomes[0][3]:
                break
            state = outcomes[0][1]
        return actions

    def _worth(self, outcomes: Sequence[Transition]) -> float:
        """Expected reward plus discounted value of the next state."""
        return sum(
            chance * (float(reward) + (0.0 if over else _DISCOUNT * self._values[there]))
            for chance, there, reward, over in outcomes
        )
