import numpy as np
import pytest

from services.trainer.advantages import advantages


def test_grpo_centres_and_divides_by_the_sample_deviation():
    np.testing.assert_allclose(advantages(np.array([1.0, 0.0]), "grpo"), [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)])


def test_drgrpo_only_centres():
    np.testing.assert_allclose(advantages(np.array([1.0, 0.0, 0.5]), "drgrpo"), [0.5, -0.5, 0.0])


def test_rloo_leaves_one_out():
    np.testing.assert_allclose(advantages(np.array([3.0, 0.0, 0.0]), "rloo"), [3.0, -1.5, -1.5])


@pytest.mark.parametrize("estimator", ["grpo", "drgrpo", "rloo"])
def test_equal_rewards_and_single_episodes_give_zero(estimator: str):
    assert not advantages(np.full(4, 0.7), estimator).round(12).any()
    assert not advantages(np.array([5.0]), estimator).any()


def test_float32_rewards_are_not_rounded_to_integers():
    assert advantages(np.array([0.7, 0.3], np.float32), "drgrpo") == pytest.approx([0.2, -0.2], abs=1e-7)
