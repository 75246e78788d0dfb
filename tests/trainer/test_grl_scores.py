"""Normalization of rewards gives the numbers of GRL's own code (tests/fixtures/grl/make_scores.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from services.trainer.algorithms.terms.rewards import Normalization, normalized
from tests.trainer.test_algorithms import trajectory

SCORES = json.loads((Path(__file__).parents[1] / "fixtures/grl/scores.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("grouping", "method", "scores", "expected"), SCORES["normalized"])
def test_rewards_are_normalized_as_by_grl(grouping, method, scores, expected):
    groups = [[trajectory(r, task=i, env="ab"[i % 2]) for r in scores[4 * i : 4 * i + 4]] for i in range(6)]
    rewards = [np.array([one.reward for one in group]) for group in groups]
    made = normalized(rewards, groups, Normalization(grouping, method))
    np.testing.assert_allclose(np.concatenate(made), expected, rtol=1e-4, atol=1e-5)
