"""Tunix's learner on this trainer's batches, beside the trainer's own on the same episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.advantages import group_relative
from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.critic import CriticSetup
from services.trainer.learner.foreign import ForeignOptions
from services.trainer.learner.policy import Policy
from services.trainer.metrics.step_metrics import StepMetrics
from shared.algorithm_schema import GrpoSection, PolicyGradientSection, PpoSection
from shared.errors import ConfigError, WeightsError
from shared.types import WeightVersion
from tests.support.torch_client import Torch
from tests.trainer.test_policy import OPTIONS, START, fine_and_rounded_vectors, held, params, policy
from tests.trainer.test_torch import compare_steps, folders, steps_of_torch
from tests.trainer.test_torch import policy as loaded
from volley_algorithms.estimators import ESTIMATORS
from volley_algorithms.sections import GspoSection
from volley_tunix import TUNIX

ROWS = 4
"""Two groups of two episodes."""
GRPO = GrpoSection(beta=0.1, sampler_is="token", epsilon_high=0.3)
SEQUENCES = GrpoSection(
    beta=0.1, epsilon_c=3.0, kl_loss_mode="kl", loss_agg_mode="sequence-mean-token-mean", sampler_is="sequence"
)
GSPO = GspoSection(name="gspo-token")


def by_tunix(section: PolicyGradientSection, n_micro: int = 1, n_iterations: int = 1) -> tuple[Policy, Policy]:
    """Two policies with the same weights: the trainer's own learner, and Tunix's."""
    own = replace(
        OPTIONS,
        algorithm=algorithm(section, n_iterations, 16),
        aggregation=section.loss_agg_mode,
        n_iterations=n_iterations,
        layout=BatchLayout((16,), ROWS // n_micro, 0),
        rows_per_step=ROWS,
    )
    options = ForeignOptions(TUNIX, section, own.temperature, n_micro, n_iterations, 2)
    return policy(own), policy(replace(own, foreign=options))


def step(one: Policy, number: int = 0) -> StepMetrics:
    return one.step(held(1, 2), WeightVersion(START.epoch, number))


@pytest.mark.parametrize(
    ("section", "n_micro", "n_iterations"),
    [
        (GRPO, 1, 1),
        pytest.param(SEQUENCES, 2, 1, marks=pytest.mark.long),
        pytest.param(GSPO, 1, 2, marks=pytest.mark.long),
    ],
)
def test_losses_and_gradients_are_ours(section: PolicyGradientSection, n_micro: int, n_iterations: int) -> None:
    """Adam's first steps depend on the sign of a gradient, so weights with almost none may differ."""
    own, theirs = by_tunix(section, n_micro, n_iterations)
    for number in range(2):
        a, b = step(own, number), step(theirs, number)
        for name, tolerance in (("loss", 2e-4), ("grad_norm", 2e-4), ("kl", 2e-4), ("entropy", 2e-3)):
            assert getattr(b, name) == pytest.approx(getattr(a, name), rel=tolerance, abs=1e-5), name
        assert b.logprob_abs_diff == pytest.approx(a.logprob_abs_diff, rel=1e-3)
        assert (b.tokens, b.reward_mean) == (a.tokens, a.reward_mean)
    before, after = params(own), params(theirs)
    differ = [np.abs(before[name] - after[name]) > 1e-5 for name in before]
    assert sum(map(np.sum, differ)) < 0.02 * sum(map(np.size, differ))
    assert all(np.abs(before[name] - after[name]).max() < 5e-3 for name in before)


def test_steps_of_both_learners_are_those_of_torch(torch: Torch, tmp_path: Path) -> None:
    own, groups = folders(tmp_path), [held(1, 2), held(3, 4)]
    both = [loaded(*own, one.options) for one in by_tunix(GrpoSection(beta=0.1))]
    known = steps_of_torch(torch, both[0], *own, groups)
    for one in both:
        compare_steps(one, groups, known)


@pytest.mark.long
def test_ppo_with_our_critic_is_ours() -> None:
    section = PpoSection(name="ppo", epsilon_high=0.3, beta=0.1, kl_loss_mode="kl")
    critic = CriticSetup(Ppo(section, 1, 16), OPTIONS.optimizer, 0)
    layout = BatchLayout((16,), ROWS, 0)
    own = replace(
        OPTIONS, algorithm=critic.algorithm, critic=critic, temperature=1.0, layout=layout, rows_per_step=ROWS
    )
    theirs = replace(own, foreign=ForeignOptions(TUNIX, section, 1.0, 1, 1, 2))
    for a, b in zip(
        *([step(one, number) for number in range(2)] for one in (policy(own), policy(theirs))), strict=True
    ):
        for name in ("loss", "grad_norm", "kl", "clip_fraction"):
            assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-3, abs=1e-5), name
        assert b.more["critic/value_loss"] == pytest.approx(a.more["critic/value_loss"], rel=1e-5)


@pytest.mark.long
def test_a_restored_policy_goes_on_bit_by_bit() -> None:
    _, straight = by_tunix(SEQUENCES, 2)
    step(straight)
    contents = straight.contents()
    kept = {name: np.array(value) for name, value in contents.optimizer.items()}
    weights = {name: np.array(value) for name, value in contents.params.items()}
    own, again = by_tunix(SEQUENCES, 2)
    again.load(weights, kept)
    step(straight, 1)
    step(again, 1)
    assert again.checksum() == straight.checksum()
    assert again.optimizer_checksum() == straight.optimizer_checksum()
    with pytest.raises(WeightsError):
        own.load_optimizer(kept)


def test_vectors_are_trained_as_they_are_published() -> None:
    """Norms and biases of a bfloat16 model: the loss sees them rounded, as engines get them."""
    _, theirs = by_tunix(GRPO)
    one, other = fine_and_rounded_vectors(theirs.options)
    assert step(one).loss == step(other).loss


def test_a_step_of_another_size_is_refused() -> None:
    _, theirs = by_tunix(GRPO)
    with pytest.raises(ConfigError, match="micro-batches"):
        theirs.step(held(1, 2, 3), START)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "drgrpo"])
def test_advantages_are_those_of_tunix(estimator: str) -> None:
    from tunix.rl import algo_core

    rewards = np.random.default_rng(3).normal(size=(3, 5))
    of_tunix = algo_core.function_registry.get_advantage_estimator(estimator)(rewards.reshape(-1), 5)
    for group, expected in zip(rewards, np.asarray(of_tunix).reshape(3, 5), strict=True):
        np.testing.assert_allclose(group_relative(group, ESTIMATORS[estimator]), expected, atol=1e-5)
