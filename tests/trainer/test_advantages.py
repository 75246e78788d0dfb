from fractions import Fraction

import numpy as np
import pytest

from services.trainer.algorithms.terms import advantages
from services.trainer.algorithms.terms.advantages import moments
from volley_algorithms import estimators

ESTIMATORS = ["grpo", "drgrpo", "rloo"]


def group_relative(rewards: np.ndarray, estimator: str) -> np.ndarray:
    return advantages.group_relative(rewards, estimators.ESTIMATORS[estimator])


def test_grpo_centres_and_divides_by_the_sample_deviation():
    np.testing.assert_allclose(
        group_relative(np.array([1.0, 0.0]), "grpo"), [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]
    )


def test_drgrpo_only_centres():
    np.testing.assert_allclose(group_relative(np.array([1.0, 0.0, 0.5]), "drgrpo"), [0.5, -0.5, 0.0])


def test_rloo_leaves_one_out():
    np.testing.assert_allclose(group_relative(np.array([3.0, 0.0, 0.0]), "rloo"), [3.0, -1.5, -1.5])


@pytest.mark.parametrize("estimator", ["grpo", "drgrpo", "rloo"])
def test_equal_rewards_and_single_episodes_give_zero(estimator: str):
    assert not group_relative(np.full(4, 0.7), estimator).round(12).any()
    assert not group_relative(np.array([5.0]), estimator).any()


def test_float32_rewards_are_not_rounded_to_integers():
    assert group_relative(np.array([0.7, 0.3], np.float32), "drgrpo") == pytest.approx([0.2, -0.2], abs=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1e9 + 0.1, 1e16 + 2, 1e100, 1.7e308, -1.7e308, 1e-300])
def test_rewards_that_are_equal_up_to_rounding_have_no_advantage_at_all(estimator: str, reward: float):
    nearly = np.full(7, reward)
    nearly[3] = np.nextafter(reward, 0)
    for rewards in (np.full(7, reward), nearly):
        assert not group_relative(rewards, estimator).any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_small_differences_between_large_rewards_count(estimator: str):
    expected = group_relative(np.array([0.0, 1.0, 2.0]), estimator)
    np.testing.assert_allclose(group_relative(np.array([0.0, 1.0, 2.0]) + 1e9, estimator), expected, rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e39, 1e160, 1.7e308])
def test_every_finite_reward_gives_a_finite_float32_in_the_right_proportion(estimator: str, scale: float):
    shape = np.array([1.0, -1.0, 0.25, 0.0])
    found = group_relative(shape * scale, estimator)
    exact = [Fraction(x) for x in shape]
    centred = np.array([float(x - sum(exact) / 4) for x in exact])
    assert np.isfinite(found.astype(np.float32)).all()
    assert np.isfinite(np.square(found.astype(np.float32) * np.float32(np.exp(20)))).all()
    np.testing.assert_allclose(found / found.max(), centred / centred.max(), rtol=1e-5)


def test_a_mean_near_0_of_rewards_with_both_signs_gives_bounded_advantages_in_maxrl():
    for scale in (1.0, 1e300):
        found = group_relative(np.array([1.0, -1.0 + 1e-15]) * scale, "maxrl")
        assert np.abs(found).max() == 1e9
        assert found[0] == -found[1]


def test_moments_of_numbers_whose_sums_overflow_are_finite():
    assert moments(np.array([1.7e308, 1.7e308, -1.7e308, -1.7e308])) == (0.0, 1.7e308)
    rewards = np.random.default_rng(0).standard_normal(50)
    assert moments(rewards) == (rewards.mean(), rewards.std())
