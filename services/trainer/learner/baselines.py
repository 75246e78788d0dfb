"""Moving averages of rewards, by environment and seat, as baselines of advantages (see `algorithms.rae`).

Invariants: the same episodes in the same order, from the same state, give the same baselines; `state` holds all of
them, so a resume is bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from shared.errors import WeightsError
from shared.seats import by_seat
from shared.types import Trajectory

type EpisodeBaselines = Mapping[str, float]
"""Baseline of each seat of an episode; of an episode without seats, under ""."""

_STATE = "baselines"


class Baselines:
    """Averages after the last step. They are 0 before the first episode."""

    def __init__(self) -> None:
        self._averages: dict[str, float] = {}

    def before(
        self, groups: Sequence[Sequence[Trajectory]], decay: float, counts: Callable[[Trajectory], bool]
    ) -> list[list[EpisodeBaselines]]:
        """Return the averages before each episode of a step, which do not include it; the state does not change.

        Args: counts: returns True for an episode that the averages learn from.
        """
        return _walked(dict(self._averages), groups, decay, counts)

    def learn(self, groups: Sequence[Sequence[Trajectory]], decay: float, counts: Callable[[Trajectory], bool]) -> None:
        """Update the averages with the episodes of a step; arguments as of `before`."""
        _walked(self._averages, groups, decay, counts)

    def state(self) -> dict[str, np.ndarray]:
        """Return the averages as an array for a checkpoint; none before the first step."""
        if not self._averages:
            return {}
        return {_STATE: np.frombuffer(orjson.dumps(self._averages, option=orjson.OPT_SORT_KEYS), np.uint8)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, bit for bit; without it, start at 0. Raises WeightsError."""
        if (stored := state.get(_STATE)) is None:
            self._averages = {}
            return
        try:
            found = orjson.loads(np.asarray(stored).astype(np.uint8).tobytes())
            self._averages = {str(key): float(value) for key, value in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise WeightsError(f"the checkpoint's baselines cannot be read: {error}") from error


def _walked(
    averages: dict[str, float],
    groups: Sequence[Sequence[Trajectory]],
    decay: float,
    counts: Callable[[Trajectory], bool],
) -> list[list[EpisodeBaselines]]:
    """Return the averages before each episode, and update them with it."""
    made = list[list[EpisodeBaselines]]()
    for group in groups:
        made.append([])
        for trajectory in group:
            known = dict[str, float]()
            for seat, one in by_seat(trajectory).items():
                key = f"{trajectory.env}/{seat}"
                known[seat] = averages.get(key, 0.0)
                if counts(trajectory):
                    averages[key] = decay * known[seat] + (1.0 - decay) * one.reward
            made[-1].append(known)
    return made
