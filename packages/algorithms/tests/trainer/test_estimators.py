"""Advantages of MaxRL, GDPO, MOPD and SAO against the papers' formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from shared import algorithm_schema as schema
from tests.trainer.test_algorithms import SAMPLED, N, advantages, episodes, gae_of_the_paper, trajectory
from volley_algorithms import sections
from volley_algorithms.sao import Sao

MAXRL = sections.MaxRlSection(name="maxrl")
SAO = sections.SaoSection(name="sao")


def test_maxrl_divides_by_the_groups_mean():
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    (found,) = advantages(MAXRL, episodes(*rewards))
    for one, wanted in zip(found, (rewards - 0.25) / 0.25, strict=True):
        np.testing.assert_allclose(one, wanted * SAMPLED, rtol=1e-12)


@pytest.mark.parametrize("rewards", [(0.0, 0.0), (1.0, 1.0), (-1.0, 0.0), (-1.0, 1.0), (0.7,)])
def test_a_group_without_a_positive_mean_or_a_difference_has_no_advantage_in_maxrl(rewards: tuple[float, ...]):
    (found,) = advantages(MAXRL, episodes(*rewards))
    assert not any(one.any() for one in found)


def test_maxrls_gradient_is_that_of_the_truncated_likelihood_in_expectation():
    """Over all outcomes of G Bernoulli samples of success p: d/dp of the sum over k of (1 - (1 - p)^k) / k.

    Less the mean score of groups with a success, the control variate: groups without one have no advantage.
    """
    p, size, expected = 0.3, 4, 0.0
    for outcome in np.ndindex(*[2] * size):
        rewards = np.array(outcome, float)
        probability = np.prod(np.where(rewards > 0, p, 1 - p))
        scores = np.where(rewards > 0, 1 / p, -1 / (1 - p))
        (found,) = advantages(MAXRL, episodes(*rewards))
        expected += probability * float(np.mean([a[4] * s for a, s in zip(found, scores, strict=True)]))
    truncated = sum((1 - p) ** (k - 1) for k in range(1, size + 1))
    without = sum(
        np.prod(np.where(np.array(o) > 0, p, 1 - p)) * np.mean(np.where(np.array(o) > 0, 1 / p, -1 / (1 - p)))
        for o in np.ndindex(*[2] * size)
        if any(o)
    )
    assert expected == pytest.approx(truncated - without, rel=1e-9)


def test_gdpo_normalizes_each_reward_before_it_adds_them():
    parts = {"goal": np.array([1.0, 0.0, 0.0, 1.0]), "form": np.array([0.1, 0.3, 0.2, 0.2]), "idle": np.ones(4)}
    weights = {"goal": 1.0, "form": 2.0, "idle": 5.0}
    each = [
        EpisodeTokens(trajectory(0.0, reward_components={k: float(v[i]) for k, v in parts.items()})) for i in range(4)
    ]
    section = sections.GdpoSection(name="gdpo", reward_components=weights)
    found = np.array([one[4] for group in advantages(section, each[:2], each[2:]) for one in group])

    def standard(r: np.ndarray) -> np.ndarray:
        halves = [(x - x.mean()) / (x.std(ddof=1) + 1e-6) for x in (r[:2], r[2:])]
        return np.nan_to_num(np.concatenate(halves))

    total = sum(w * standard(parts[name]) for name, w in weights.items())
    np.testing.assert_allclose(found, (total - np.mean(total)) / (np.std(total) + 1e-6), rtol=1e-9)


def test_saos_lambda_follows_the_length_and_the_critics_target_is_the_return():
    values = np.where(SAMPLED, np.linspace(0, 1, N), 0).astype(np.float32)
    group = [EpisodeTokens(trajectory(1.0), values=values)]
    made = Sao(SAO, 1, 8)
    rewards = np.zeros(8)
    rewards[-1] = 1.0
    wanted = gae_of_the_paper(rewards, values[SAMPLED].astype(np.float64), 1.0, 1 - 1 / (1.5 * 8))
    np.testing.assert_allclose(made.advantages([group])[0][0][SAMPLED], wanted)
    np.testing.assert_allclose(made.returns([group])[0][0][SAMPLED], np.ones(8), rtol=1e-6)
    steeper = algorithm(schema.PpoSection(name="ppo", gae_lambda_alpha=0.05, whiten_advantages=False), 1, 8)
    at_once = gae_of_the_paper(rewards, values[SAMPLED].astype(np.float64), 1.0, 0.0)
    np.testing.assert_allclose(steeper.advantages([group])[0][0][SAMPLED], at_once)


def test_mopds_advantage_is_the_teachers_and_that_of_rewards():
    rng = np.random.default_rng(0)
    teacher, old = (np.where(SAMPLED, -rng.random(N), 0).astype(np.float32) for _ in range(2))
    group = [EpisodeTokens(trajectory(r, teacher_logprobs=teacher), old=old) for r in (1.0, 0.0)]
    section = sections.MopdSection(name="mopd", teacher_kl_coef=0.5, advantage_estimator="drgrpo")
    taught = 0.5 * (teacher.astype(np.float64) - old)
    np.testing.assert_allclose(advantages(section, group)[0][0], taught)
    both = advantages(section.model_copy(update={"outcome_coef": 2.0}), group)[0]
    np.testing.assert_allclose(both[0], taught + SAMPLED, rtol=1e-12)
    np.testing.assert_allclose(both[1], taught - SAMPLED, rtol=1e-12)
    assert algorithm(section, 1, 8).needs.teacher
    assert algorithm(section, 1, 8).needs.old
    single = [replace(group[0])]
    np.testing.assert_allclose(advantages(section, single)[0][0], taught)
