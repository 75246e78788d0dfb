"""Rows of a step: groups become sequences with advantages, and each token gets its weight in the loss.

No model here: token values that only models know (of the reference, the policy, the critic) come from a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.trainer.algorithms.terms.algorithm import Algorithm, EpisodeTokens
from services.trainer.batches.batch import (
    Aggregation,
    Row,
    by_sequence,
    left_out,
    policy_rows,
    row_weights,
    stored,
    weigh_observations,
    with_observations,
    with_staleness,
)
from services.trainer.learner.baselines import EpisodeBaselines
from shared.types import Trajectory, WeightVersion

type ScoreRows = Callable[[list[list[Row]]], list[list[Row]]]
"""Adds the token values that an algorithm needs to the rows of each episode."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The episodes of a step by group, and the rows of each episode: one row for each of its sequences."""

    episodes: list[list[EpisodeTokens]]
    rows: list[list[Row]]

    def with_values(self, name: str, values: Sequence[Sequence[np.ndarray]]) -> GroupRows:
        """Set an array of the rows from values [N] of each episode's stored tokens, by group."""
        every = [one for group in values for one in group]
        return replace(self, rows=[_with(rows, name, one) for rows, one in zip(self.rows, every, strict=True)])

    def weighted(
        self, algorithm: Algorithm, aggregation: Aggregation, max_response_length: int
    ) -> tuple[list[Row], np.ndarray]:
        """Return all rows, and the weight of their tokens in the loss of the step, float64 [number of rows].

        Episodes that are not in the loss keep their rows, with mask 0.
        """
        every = [episode.trajectory for group in self.episodes for episode in group]
        masked = [
            row if algorithm.counts(trajectory) else left_out(row)
            for trajectory, rows in zip(every, self.rows, strict=True)
            for row in rows
        ]
        owners = [number for number, rows in enumerate(self.rows) for _ in rows]
        weights = row_weights(masked, aggregation, max_response_length, owners)
        return weigh_observations(masked), weights


def group_rows(
    groups: Sequence[Sequence[Trajectory]],
    before: WeightVersion,
    algorithm: Algorithm,
    score: ScoreRows | None = None,
    baselines: Sequence[Sequence[EpisodeBaselines]] | None = None,
) -> GroupRows:
    """Make the rows of the trajectories, with the advantages that the algorithm computes.

    Args:
        before: version of the weights that the step starts from.
        score: None if the algorithm needs no token values.
        baselines: of each episode, if the algorithm needs them.
    """
    rows = [policy_rows(trajectory, before) for group in groups for trajectory in group]
    if algorithm.needs.observations:
        rows = [with_observations(its) for its in rows]
    if algorithm.needs.staleness:
        of_rows = (trajectory for group in groups for trajectory in group)
        rows = [with_staleness(its, trajectory, before) for its, trajectory in zip(rows, of_rows, strict=True)]
    if score is not None:
        rows = score(rows)
    known = iter(rows)
    episodes = [[_episode(trajectory, next(known)) for trajectory in group] for group in groups]
    if baselines is not None:
        pairs = [zip(group, its, strict=True) for group, its in zip(episodes, baselines, strict=True)]
        episodes = [[replace(episode, baselines=own) for episode, own in group] for group in pairs]
    return GroupRows(episodes, rows).with_values("advantages", algorithm.advantages(episodes))


def _episode(trajectory: Trajectory, rows: Sequence[Row]) -> EpisodeTokens:
    return EpisodeTokens(trajectory, *(stored(rows, name) for name in ("reference", "old", "values")))


def _with(rows: Sequence[Row], name: str, values: np.ndarray) -> list[Row]:
    """Set an array of an episode's rows to `values` [N] of its stored tokens."""
    parts: Sequence[Any] = by_sequence(values, rows)
    return [replace(row, **{name: part}) for row, part in zip(rows, parts, strict=True)]
