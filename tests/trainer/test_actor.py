"""The actor's loss as a function of log-probabilities, against float64 numpy written from the papers' formulas: every
form of it, its gradient by central differences, and what hypothesis can think of as a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import Batch
from shared.algorithm_base import PolicyGradientSection, SamplerCorrection
from shared.algorithm_schema import GrpoSection
from volley_algorithms.sections import (
    CispoSection,
    DppoSection,
    GspoSection,
    KpopSection,
    MopdSection,
    SaoSection,
    SapoSection,
)

PPO: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
FORMS: dict[str, PolicyGradientSection] = {
    "ppo": GrpoSection(**PPO),
    "unclipped": GrpoSection(epsilon=None),
    "dual clip": GrpoSection(epsilon_c=1.5),
    "gspo": GspoSection(name="gspo-token", epsilon=3e-2, epsilon_high=4e-2),
    "cispo": CispoSection(name="cispo", epsilon=1.0, epsilon_high=0.3),
    "tis by token": GrpoSection(**PPO, sampler_is="token", sampler_is_threshold=1.1),
    "tis by sequence": GrpoSection(**PPO, sampler_is="sequence", sampler_is_threshold=1.5),
    "mis by token": GrpoSection(**PPO, sampler_rs="token", sampler_rs_bounds=(0.8, 1.2)),
    "mis by sequence": GrpoSection(**PPO, sampler_is="token", sampler_rs="sequence"),
    "mis by geometric mean": GrpoSection(**PPO, sampler_rs="geometric", sampler_rs_bounds=(0.95, 1.05)),
    "kl": GrpoSection(**PPO, beta=0.3),
    "entropy": GrpoSection(**PPO, entropy_coef=0.05),
    "dppo, tv": DppoSection(name="dppo", epsilon=0.01, epsilon_high=0.02, ratio_cap=1.05),
    "dppo, kl, and a pull": DppoSection(name="dppo", divergence="kl", epsilon=1e-3, kl_tau=0.1),
    "kpop": KpopSection(name="kpop", epsilon=1e-3, kl_tau=0.1),
    "sapo": SapoSection(name="sapo", tau_neg=2.0),
    "sapo, tis": SapoSection(name="sapo", sampler_is="token", sampler_is_threshold=1.1),
    "sao": SaoSection(name="sao", epsilon=0.05, epsilon_high=0.1),
    "mopd": MopdSection(name="mopd", ratio_bounds=(0.9, 1.1)),
}


def reference(
    section: PolicyGradientSection, batch: Batch, present: np.ndarray, start: np.ndarray, entropy: np.ndarray
) -> float:
    """In float64; `start` are the present log-probabilities where the loss takes them for constants."""
    m = batch.mask > 0
    behaviour, advantages = np.asarray(batch.behaviour, np.float64), np.asarray(batch.advantages, np.float64)
    correction, total = section.correction, 0.0
    for i in range(len(m)):
        if not m[i].any():
            continue
        at = m[i]
        p, p0, b, a = present[i][at], start[i][at], behaviour[i][at], advantages[i][at]
        old = b
        if correction.is_used:
            old = p0 if batch.old is None else np.asarray(batch.old, np.float64)[i][at]
        loss = surrogate(section, p, p0, old, b, a)
        loss = loss * weights(old - b, correction)
        if batch.reference is not None:
            d = np.asarray(batch.reference, np.float64)[i][at] - p
            loss = loss + section.beta * (np.exp(d) - 1 - d)
        loss = loss - section.entropy_coef * entropy[i][at]
        total += float(batch.weight[i, 0]) * loss.sum()
    return total


def surrogate(section: Any, p: np.ndarray, p0: np.ndarray, old: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The papers' losses of one sequence's tokens; `p0` is p where a formula stops the gradient."""
    ratio, fixed, d = np.exp(p - old), np.exp(p0 - b), np.exp(p0) - np.exp(b)
    match section.name:
        case "grpo" | "gspo-token" | "cispo":
            high = section.epsilon if section.epsilon_high is None else section.epsilon_high
            bounds = (-np.inf, np.inf) if section.epsilon is None else (1 - section.epsilon, 1 + high)
            if section.name == "cispo":
                return -np.clip(np.exp(p0 - old), *bounds) * a * p
            if section.name == "gspo-token":
                ratio = np.exp(p - p0 + np.mean(p0 - old))
            loss = -np.minimum(ratio * a, np.clip(ratio, *bounds) * a)
            return (
                loss if section.epsilon_c is None else np.where(a < 0, np.minimum(loss, -section.epsilon_c * a), loss)
            )
        case "dppo":
            far = np.abs(d) if section.divergence == "tv" else bernoulli_kl(np.exp(b), np.exp(p0))
            low, high = section.epsilon, section.epsilon_high or section.epsilon
            masked = np.where(a > 0, (d > 0) & (far > high), (d < 0) & (far > low))
            return -np.minimum(fixed, section.ratio_cap) * ~masked * a * p + section.kl_tau * (p - b) ** 2
        case "kpop":
            both = bernoulli_kl(np.exp(b), np.exp(p0)), bernoulli_kl(np.exp(p0), np.exp(b))
            return -fixed * (np.maximum(*both) <= section.epsilon) * a * p + section.kl_tau * (p - b) ** 2
        case "sapo":
            tau = np.where(a > 0, section.tau_pos, section.tau_neg)
            return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * a
        case "sao":
            return -fixed * ((fixed > 1 - section.epsilon) & (fixed < 1 + section.epsilon_high)) * a * p
        case _:
            low, high = section.ratio_bounds
            return -fixed * ((fixed >= low) & (fixed <= high)) * a * p


def bernoulli_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def weights(difference: np.ndarray, correction: SamplerCorrection) -> np.ndarray:
    def ratio(level: str) -> np.ndarray | np.floating[Any]:
        levels = {"token": difference, "sequence": difference.sum(), "geometric": difference.mean()}
        return np.exp(levels[level])

    made = np.ones(len(difference))
    if correction.level != "none":
        made = made * np.minimum(ratio(correction.level), correction.threshold)
    if correction.rejection != "none":
        r = ratio(correction.rejection)
        made = made * ((r >= correction.bounds[0]) & (r <= correction.bounds[1]))
    return made


def batch_of(seed: int, rows: int, length: int, spread: float, *, old: bool = False) -> tuple[Batch, np.ndarray]:
    """A batch with masks of any shape, and the present log-probabilities around those of the behaviour."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, length)) < rng.random((rows, 1))).astype(np.float32)
    behaviour = (np.log(rng.uniform(0.05, 0.9, (rows, length))) * mask).astype(np.float32)
    nearby = [
        (np.minimum(behaviour + spread * rng.standard_normal((rows, length)), -1e-4) * mask).astype(np.float32)
        for _ in range(3)
    ]
    ints = np.ones((rows, length), np.int32)
    made = Batch(
        ints,
        ints,
        mask,
        behaviour,
        (rng.standard_normal((rows, 1)) * mask).astype(np.float32),
        mask,
        rng.uniform(0.01, 1, (rows, 1)).astype(np.float32),
        reference=nearby[1],
        old=nearby[2] if old else None,
    )
    return made, nearby[0]


def value_and_gradient(section: PolicyGradientSection, batch: Batch, present: np.ndarray, entropy: np.ndarray):
    made = algorithm(section, 1, 8)

    def of(logprobs: jax.Array):
        return made.loss(TokenScores(logprobs, jnp.asarray(entropy, jnp.float32)), batch)

    (value, told), gradient = jax.value_and_grad(of, has_aux=True)(jnp.asarray(present))
    return float(value), np.asarray(gradient, np.float64), statistics.values(jax.device_get(told))


@pytest.mark.parametrize("old", [False, True], ids=["first update", "later update"])
@pytest.mark.parametrize("name", FORMS)
def test_value_and_gradient_equal_the_float64_reference(name: str, old: bool):
    section = FORMS[name]
    for seed in range(2):
        batch, present = batch_of(seed, 4, 9, 0.1, old=old)
        entropy = np.random.default_rng(seed).random(present.shape)
        value, gradient, _ = value_and_gradient(section, batch, present, entropy)
        start = present.astype(np.float64)
        assert value == pytest.approx(reference(section, batch, start, start, entropy), rel=2e-5, abs=2e-6)
        h = 1e-6
        for i, t in np.argwhere(np.ones_like(present))[::5]:
            step = np.zeros_like(start)
            step[i, t] = h
            ahead, behind = (reference(section, batch, start + s * step, start, entropy) for s in (1, -1))
            assert gradient[i, t] == pytest.approx((ahead - behind) / (2 * h), rel=2e-3, abs=2e-5)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([(1, 1), (3, 7)]),
    spread=st.sampled_from([0.0, 0.1, 5.0, 1e4]),
    name=st.sampled_from(sorted(FORMS)),
    old=st.booleans(),
)
def test_nothing_is_ever_not_finite(seed: int, size: tuple[int, int], spread: float, name: str, old: bool):
    """Masks without a token, single tokens, ratios of any size; and what stands at masked positions does not matter."""
    batch, present = batch_of(seed, *size, spread, old=old)
    entropy = np.zeros_like(present)
    value, gradient, told = value_and_gradient(FORMS[name], batch, present, entropy)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert all(found is None or np.isfinite(found) for found in told.values())
    assert not gradient[batch.mask == 0].any()
    dirty = replace(
        batch,
        behaviour=np.where(batch.mask > 0, batch.behaviour, np.nan),
        reference=np.where(batch.mask > 0, batch.reference, np.inf),
        old=None if batch.old is None else np.where(batch.mask > 0, batch.old, -np.inf),
    )
    spoiled = np.where(batch.mask > 0, present, np.nan).astype(np.float32)
    again, of_dirty, _ = value_and_gradient(FORMS[name], dirty, spoiled, np.where(batch.mask > 0, entropy, np.nan))
    assert again == value
    assert np.array_equal(np.where(batch.mask > 0, of_dirty, 0), gradient)


def test_a_ratio_between_the_bounds_is_not_clipped_and_one_outside_has_no_gradient():
    ones = np.ones((1, 3), np.float32)
    batch = Batch(ones, ones, ones, -ones, ones, ones, np.ones((1, 1), np.float32))
    present = np.log(np.array([[1.1, 1.5, 0.5]])) - 1
    _, gradient, told = value_and_gradient(FORMS["ppo"], batch, present.astype(np.float32), 0 * ones)
    assert (gradient[0, 1], told["clip_fraction"]) == (0, pytest.approx(1 / 3))
    assert gradient[0, 0] == pytest.approx(-1.1, rel=1e-5)
    _, gradient, _ = value_and_gradient(FORMS["cispo"], batch, present.astype(np.float32), 0 * ones)
    assert gradient[0].tolist() == pytest.approx([-1.1, -1.3, -0.5], rel=1e-5)


def test_the_effective_share_is_kishs():
    ones = np.ones((2, 2), np.float32)
    old = np.log(np.array([[1.0, 1.0], [0.25, 0.25]])).astype(np.float32)
    batch = Batch(ones, ones, ones, 0 * ones, ones, ones, np.ones((2, 1), np.float32), old=old)
    _, _, told = value_and_gradient(FORMS["tis by token"], batch, old, 0 * ones)
    w = np.array([1, 1, 0.25, 0.25])
    assert told["effective_share"] == pytest.approx(w.sum() ** 2 / (4 * (w**2).sum()))
    assert told["importance_weight"] == pytest.approx(w.mean())
