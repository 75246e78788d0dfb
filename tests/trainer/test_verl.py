"""Losses and advantages against those of verl 0.9.1's `core_algos` on the same numbers.

`tests/fixtures/verl/make.py` wrote the numbers with the real package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.advantages import gae
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import Batch
from shared import algorithm_schema as schema
from shared.algorithm_base import PolicyGradientSection
from tests.trainer.test_algorithms import SAMPLED, advantages, trajectory
from volley_algorithms import sections

FOUND: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures/verl/core_algos.json").read_text("utf-8"))
GIVEN = {name: np.array(value) for name, value in FOUND["inputs"].items()}
SECTIONS: dict[str, PolicyGradientSection] = {
    "vanilla": schema.GrpoSection(epsilon=0.2, epsilon_high=0.28, epsilon_c=3.0),
    "gspo": sections.GspoSection(name="gspo-token", epsilon=0.03, epsilon_high=0.04),
    "cispo": sections.CispoSection(name="cispo", epsilon=0.2, epsilon_high=0.28),
    "dppo_tv": sections.DppoSection(name="dppo", epsilon=0.04, epsilon_high=0.06, ratio_cap=1.2),
    "dppo_kl": sections.DppoSection(name="dppo", divergence="kl", epsilon=0.008, epsilon_high=0.012),
    "sapo": sections.SapoSection(name="sapo"),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_loss_and_its_gradient_are_verls(name: str):
    mask = GIVEN["mask"].astype(np.float32)
    of_row = mask.sum(1, keepdims=True)
    weight = np.ones_like(of_row) / mask.sum() if name not in ("gspo", "sapo") else 1 / (len(mask) * of_row)
    old, given = (np.asarray(GIVEN[key], np.float32) for key in ("old", "advantages"))
    ints = np.zeros(mask.shape, np.int32)
    batch = Batch(ints, ints, mask, old, given * mask, mask, weight.astype(np.float32))
    made = algorithm(SECTIONS[name], 1, 9)
    present = jnp.asarray(GIVEN["new"], jnp.float32)
    (value, _), gradient = jax.value_and_grad(
        lambda x: made.loss(TokenScores(x, jnp.zeros_like(x)), batch), has_aux=True
    )(present)
    wanted = FOUND["losses"][name]
    assert float(value) == pytest.approx(wanted["loss"], rel=2e-6)
    np.testing.assert_allclose(gradient, wanted["gradient"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "section"),
    [("grpo", schema.GrpoSection()), ("rloo", sections.RlooSection(name="rloo"))],
)
def test_advantages_of_a_group_are_verls(name: str, section: PolicyGradientSection):
    rewards = FOUND["advantages"]["rewards"]
    groups = [[EpisodeTokens(trajectory(r)) for r in part] for part in (rewards[:2], rewards[2:])]
    found = [one[4] for group in advantages(section, *groups) for one in group]
    np.testing.assert_allclose(found, FOUND["advantages"][name], rtol=1e-6)


def test_advantages_normalized_over_the_step_are_verls_but_for_its_degrees_of_freedom():
    """verl divides by the deviation with ddof=1 over the step's 36 tokens."""
    rewards, n = FOUND["advantages"]["rewards"], GIVEN["mask"].size
    baseline = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", baseline="group")
    groups = [[EpisodeTokens(trajectory(r)) for r in part] for part in (rewards[:2], rewards[2:])]
    found = np.array([one[4] for group in advantages(baseline, *groups) for one in group])
    wanted = FOUND["advantages"]["reinforce_plus_plus_baseline"]
    np.testing.assert_allclose(found * np.sqrt((n - 1) / n), wanted, rtol=1e-5)

    parts = FOUND["advantages"]["gdpo"]["components"]
    each = [EpisodeTokens(trajectory(0.0, reward_components={k: v[i] for k, v in parts.items()})) for i in range(4)]
    section = sections.GdpoSection(name="gdpo", reward_components={"goal": 1.0, "format": 0.5})
    found = np.array([one[4] for group in advantages(section, each[:2], each[2:]) for one in group])
    np.testing.assert_allclose(found * np.sqrt((n - 1) / n), FOUND["advantages"]["gdpo"]["advantages"], rtol=1e-5)
    assert not advantages(section, each[:2], each[2:])[0][0][~SAMPLED].any()


def test_gae_skips_the_environments_tokens_as_verls_does():
    mask, values, rewards = (GIVEN[name] for name in ("mask", "values", "rewards"))
    at = mask > 0
    made = [gae(r, v, m, 0.9, 0.8) for r, v, m in zip(rewards, values, at, strict=True)]
    returns = np.array(FOUND["advantages"]["returns"])
    np.testing.assert_allclose((np.array(made) + values)[at], returns[at], rtol=1e-5, atol=1e-7)  # verl: float32 gamma
