"""Seats in an algorithm: each is an episode of its own, compared with the same seat of the group's other episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.trainer.algorithms.terms.algorithm import EpisodeGroup, EpisodeTokens
from shared.seats import by_seat, sequences_of

type Compute = Callable[[Sequence[EpisodeGroup]], list[list[np.ndarray]]]
"""From groups of episodes to float64 [N] for each episode."""


def for_each_seat(groups: Sequence[EpisodeGroup], compute: Compute) -> list[list[np.ndarray]]:
    """Compute float64 [N] for each episode, whose seats `compute` gets in groups of their own.

    A group without seats is passed on as it is. A seat that did not move in an episode is missing in its group.
    """
    split = [[_places(episode) for episode in group] for group in groups]
    keys = [
        (number, seat) for number, group in enumerate(split) for seat in dict.fromkeys(s for one in group for s in one)
    ]
    of_seats = [
        [
            _seat(episode, seat, places[seat])
            for episode, places in zip(groups[n], split[n], strict=True)
            if seat in places
        ]
        for n, seat in keys
    ]
    made = [[np.zeros(episode.trajectory.n_stored) for episode in group] for group in groups]
    for (n, seat), values in zip(keys, compute(of_seats), strict=True):
        following = iter(values)
        for whole, places in zip(made[n], split[n], strict=True):
            if seat in places:
                whole[places[seat]] = next(following)
    return made


def _places(episode: EpisodeTokens) -> dict[str, np.ndarray]:
    """Return the positions of each seat's tokens among the episode's N stored tokens."""
    lengths = episode.trajectory.own_lengths()
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return {
        seat: np.concatenate([parts[number] for number in numbers])
        for seat, numbers in sequences_of(episode.trajectory).items()
    }


def _seat(episode: EpisodeTokens, seat: str, places: np.ndarray) -> EpisodeTokens:
    values = {name: getattr(episode, name) for name in ("reference", "old", "values")}
    own = {name: None if value is None else value[places] for name, value in values.items()}
    baselines = {name: value for name, value in episode.baselines.items() if name == seat}
    return EpisodeTokens(by_seat(episode.trajectory)[seat], **own, baselines=baselines)
