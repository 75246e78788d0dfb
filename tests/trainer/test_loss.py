"""The GRPO loss and its gradient against a float64 numpy reference, and what must not change them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import Batch, BatchLayout, Row, micro_batches, row_weights
from services.trainer.learner.scoring import objective, params_of
from shared.algorithm_base import ClippedSection
from shared.algorithm_schema import GrpoSection
from shared.models.names import from_hf, hf_name
from tests.support import models
from tests.trainer import grpo_ref
from tests.trainer.grpo_ref import ReferenceSpec, Sequence_
from tests.trainer.support import CONFIG as TWO_LAYERS
from tests.trainer.support import model_of, rows
from volley_algorithms.sections import GspoSection
from volley_supervised.learner.imitation import supervised_loss

CONFIG = TWO_LAYERS | {"num_hidden_layers": 1}
WEIGHTS = models.random_weights(CONFIG, seed=1)
LAYOUT = BatchLayout(buckets=(32,), rows=6, pad_id=0)

SPECS = {
    "plain": ReferenceSpec(),
    "clip-higher, sequence means": ReferenceSpec(epsilon=0.1, epsilon_high=0.3, aggregation="sequence-mean-token-mean"),
    "dr. grpo": ReferenceSpec(aggregation="sequence-mean-token-scale", max_response_length=17),
    "sums, k1": ReferenceSpec(aggregation="seq-mean-token-sum", beta=0.3, kl="kl"),
    "k2, temperature": ReferenceSpec(beta=0.3, kl="mse_kl", temperature=0.7),
    "k3": ReferenceSpec(beta=0.3, kl="low_var_kl"),
    "gspo-token": ReferenceSpec(algo="gspo-token", aggregation="sequence-mean-token-mean"),
    "truncated importance sampling": ReferenceSpec(threshold=1.1, beta=0.1, temperature=1.3),
}


def section(spec: ReferenceSpec) -> ClippedSection:
    return made(spec.epsilon, spec.epsilon_high, spec.beta, spec.algo, spec.kl, spec.threshold)


def made(epsilon: float, high: float, beta: float, algo: str, kl_mode: Any, threshold: float | None) -> ClippedSection:
    keys: dict[str, Any] = {"epsilon": epsilon, "epsilon_high": high, "beta": beta, "kl_loss_mode": kl_mode}
    if threshold is not None:
        keys |= {"sampler_is": "token", "sampler_is_threshold": threshold}
    return GrpoSection(**keys) if algo == "grpo" else GspoSection(name="gspo-token", **keys)


def batch_of(some: list[Row], spec: ReferenceSpec, layout: BatchLayout = LAYOUT, n_micro: int = 1) -> list[Batch]:
    return micro_batches(some, row_weights(some, spec.aggregation, spec.max_response_length), layout, n_micro)


def near_policy(spec: ReferenceSpec, n: int = 6, seed: int = 0) -> tuple[list[Row], list[Sequence_], list[np.ndarray]]:
    """Rows whose behaviour log-probabilities lie around the policy's, so that some ratios are clipped and
    some are not.
    """
    rng = np.random.default_rng(seed)
    made, sequences, start = [], [], []
    for row in sorted(rows(n, seed), key=lambda r: -len(r.ids)):
        logp = grpo_ref.token_logprobs(WEIGHTS, CONFIG, row.ids, spec.temperature)
        behaviour = np.where(row.mask, logp + 0.15 * rng.standard_normal(len(logp)), 0).astype(np.float32)
        reference = logp + 0.2 * rng.standard_normal(len(logp))
        made.append(replace(row, behaviour=behaviour))
        sequences.append(
            Sequence_(row.ids, row.mask > 0, behaviour.astype(np.float64), reference, float(row.advantages[-1]))
        )
        start.append(logp)
    return made, sequences, start


def with_reference(batch: Batch, sequences: list[Sequence_]) -> Batch:
    table = np.zeros_like(batch.behaviour)
    for i, s in enumerate(sequences):
        table[i, : len(s.ids) - 1] = s.reference[1:]
    return replace(batch, reference=table)


@cache
def model():
    return model_of(WEIGHTS, CONFIG)


@cache
def evaluator(section: ClippedSection | None, temperature: float):
    """Compiled once for all batches of a shape; None stands for the supervised loss."""
    loss = supervised_loss if section is None else algorithm(section, 1, 64).loss
    return jax.jit(jax.value_and_grad(objective(model(), loss, temperature), has_aux=True))


def value_and_grad(section: ClippedSection | None, batch: Batch, temperature: float):
    (value, told), gradient = evaluator(section, temperature)(params_of(model()), batch)
    return float(value), jax.device_get(told), {k: np.asarray(v) for k, v in gradient.items()}


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradient_equal_the_float64_reference(name: str):
    spec = SPECS[name]
    some, sequences, start = near_policy(spec)
    batch = with_reference(batch_of(some, spec)[0], sequences)
    value, _, gradient = value_and_grad(section(spec), batch, spec.temperature)
    assert value == pytest.approx(grpo_ref.loss(start, start, sequences, spec), rel=2e-5, abs=2e-6)
    for direction in directions():
        expected = grpo_ref.slope(WEIGHTS, CONFIG, direction, sequences, spec, start)
        found = sum(
            float((gradient[k] * from_hf(k, direction[hf_name(k)], gradient[k].shape)).sum(dtype=np.float64))
            for k in gradient
        )
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5)


def directions() -> list[dict[str, np.ndarray]]:
    """A direction through all weights, and one through each end of the network alone."""
    rng = np.random.default_rng(7)
    everything = {k: rng.standard_normal(w.shape) for k, w in WEIGHTS.items()}
    alone = ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight")
    return [everything, *({k: v * (k == name) for k, v in everything.items()} for name in alone)]


def test_reference_rejects_a_wrong_mask():
    """The comparison above has teeth: training on environment tokens too is seen."""
    spec = SPECS["plain"]
    some, sequences, start = near_policy(spec)
    wrong = [replace(row, mask=np.where(np.arange(len(row.mask)) < 4, 0, 1).astype(np.uint8)) for row in some]
    value, _, _ = value_and_grad(section(spec), batch_of(wrong, spec)[0], 1.0)
    assert abs(value - grpo_ref.loss(start, start, sequences, spec)) > 1e-3


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]
)
def test_micro_batches_add_up_to_the_whole_batch(aggregation: str):
    spec = ReferenceSpec(aggregation=aggregation)
    some, _, _ = near_policy(spec, n=5)
    loss = section(spec)
    whole, told, gradient = value_and_grad(loss, batch_of(some, spec)[0], 1.0)
    parts = [
        value_and_grad(loss, b, 1.0)
        for b in batch_of(some, spec, replace(LAYOUT, buckets=(16, 24, 32), rows=2), n_micro=3)
    ]
    assert np.sum([p[0] for p in parts]) == pytest.approx(whole, rel=1e-5)
    together = statistics.values(statistics.joined([p[1] for p in parts]))
    assert together == pytest.approx(statistics.values(told), rel=1e-5)
    for name, full in gradient.items():
        np.testing.assert_allclose(
            np.sum([p[2][name] for p in parts], axis=0), full, atol=2e-6 * max(1.0, np.abs(full).max())
        )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e4])
def test_what_stands_at_masked_positions_does_not_matter(poison: float):
    spec = SPECS["truncated importance sampling"]
    some, sequences, _ = near_policy(spec)
    clean = with_reference(batch_of(some, spec)[0], sequences)
    dirty = replace(
        clean,
        **{
            k: np.where(clean.mask > 0, getattr(clean, k), poison).astype(np.float32)
            for k in ("behaviour", "reference")
        },
    )
    loss = section(spec)
    (a, _, ga), (b, _, gb) = (value_and_grad(loss, x, spec.temperature) for x in (clean, dirty))
    assert a == b
    assert all(np.array_equal(ga[k], gb[k]) for k in ga)


def test_padding_changes_nothing():
    spec = SPECS["plain"]
    some, _, _ = near_policy(spec)
    loss = section(spec)
    short = value_and_grad(loss, batch_of(some, spec)[0], 1.0)
    long = value_and_grad(loss, batch_of(some, spec, BatchLayout((64,), 8, pad_id=5))[0], 1.0)
    assert short[0] == pytest.approx(long[0], rel=1e-5)
    np.testing.assert_allclose(short[2]["lm_head.w"], long[2]["lm_head.w"], atol=1e-6)


def test_importance_uses_the_given_old_logprobs_after_the_first_iteration():
    ones = jnp.ones((1, 2))
    batch = Batch(ones, ones, ones, -2 * ones, ones, ones, jnp.ones((1, 1)), old=-1.5 * ones)
    scores = type("Scores", (), {"logprobs": -ones, "entropy": ones})
    value, _ = algorithm(made(0.2, 0.2, 0.0, "grpo", "kl", 10.0), 1, 64).loss(scores, batch)
    assert float(value) == pytest.approx(-2 * min(np.exp(0.5), 1.2) * np.exp(0.5), rel=1e-6)


def test_metrics_are_sums_over_trainable_tokens():
    spec = ReferenceSpec()
    some, _, start = near_policy(spec)
    _, told, _ = value_and_grad(section(spec), batch_of(some, spec)[0], 1.0)
    found = statistics.values(told)
    n = sum(row.n_tokens for row in some)
    delta = sum(np.abs(logp - row.behaviour)[row.mask > 0].sum() for logp, row in zip(start, some, strict=True))
    assert found["tokens"] == n
    assert found["logprob_abs_diff"] == pytest.approx(delta / n, rel=1e-4) == found["logprob_abs_diff_current"]
    assert 0 < found["clip_fraction"] < 1
    assert found["clip_fraction_low"] + found["clip_fraction_high"] == pytest.approx(found["clip_fraction"])


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    some, _, start = near_policy(ReferenceSpec())
    value, _, _ = value_and_grad(None, batch_of(some, ReferenceSpec())[0], 1.0)
    expected = -np.concatenate([logp[row.mask > 0] for logp, row in zip(start, some, strict=True)]).mean()
    assert value == pytest.approx(expected, rel=1e-5)


@cache
def compiled_k3():
    """Loss and gradient of one token without advantage, as functions of its log-probability and the reference's."""
    ones = jnp.ones((1, 1))
    loss = algorithm(made(0.2, 0.2, 1.0, "grpo", "low_var_kl", None), 1, 64).loss

    def of(logprob: jax.Array, reference: jax.Array):
        batch = Batch(ones, ones, ones, -ones, 0 * ones, ones, jnp.ones((1, 1)), reference=reference)
        return loss(TokenScores(logprob, 0 * ones), batch)

    return jax.jit(jax.value_and_grad(of, has_aux=True))


def k3(distance: float) -> tuple[float, float, float]:
    """Loss, its mean `kl`, and gradient of one token without advantage, `distance` nats from the reference."""
    given = (np.full((1, 1), min(0.0, sign * distance), np.float32) for sign in (-1, 1))
    (value, told), gradient = compiled_k3()(*given)
    return float(value), told["kl"].value(), float(gradient[0, 0])


DISTANCES = [-1e4, -88.0, -1.0, 0.0, 1e-3, 1.0, 19.0, 20.0, 21.0, 44.0, 88.0, 89.0, 700.0, 1e4]


@pytest.mark.parametrize("distance", DISTANCES)
def test_k3_and_its_gradient_are_the_float64_ones_up_to_the_bound_and_the_tangent_beyond(distance: float):
    """`distance` is log p(reference) - log p(policy) in nats; float32 overflows beyond 88, and its squares
    beyond 44.
    """
    value, kl, gradient = k3(distance)
    near = np.float64(min(distance, 20.0))
    slope = np.exp(near) - 1.0
    expected = np.exp(near) - near - 1.0 + slope * (np.float64(distance) - near)
    assert value == kl == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert gradient == pytest.approx(-slope, rel=1e-6, abs=1e-6)
    assert np.isfinite(np.float32(slope) ** 2)


@pytest.mark.parametrize("distance", [sign * d for d in (1e-6, 1e-4, 1e-2, 0.124, 0.126, 1.0) for sign in (1, -1)])
def test_k3_and_its_gradient_are_precise_near_0(distance: float):
    value, kl, gradient = k3(distance)
    d = np.float64(np.float32(distance))
    assert value == kl == pytest.approx(np.expm1(d) - d, rel=3e-6, abs=0.0)
    assert gradient == pytest.approx(-np.expm1(d), rel=3e-6, abs=0.0)


@cache
def compiled_ratios(algo: str):
    """Loss and gradient of two rows of three tokens with huge advantages, by their log-probabilities and older ones."""
    ones = jnp.ones((2, 3))
    advantages = jnp.array([[1e9] * 3, [-1e9] * 3])
    loss = algorithm(made(0.2, 0.2, 0.1, algo, "low_var_kl", 2.0), 1, 64).loss

    def of(logprobs: jax.Array, behaviour: jax.Array):
        batch = Batch(ones, ones, ones, behaviour, advantages, ones, jnp.ones((2, 1)), reference=behaviour)
        return loss(TokenScores(logprobs, 0 * ones), replace(batch, old=behaviour))

    return jax.jit(jax.value_and_grad(of, has_aux=True))


@pytest.mark.parametrize("algo", ["grpo", "gspo-token"])
@pytest.mark.parametrize("apart", [-1e4, -300.0, 300.0, 1e4])
def test_ratios_of_policies_far_apart_are_finite_and_so_are_their_gradients(algo: str, apart: float):
    given = (np.full((2, 3), min(0.0, sign * apart), np.float32) for sign in (1, -1))
    (value, told), gradient = compiled_ratios(algo)(*given)
    assert np.isfinite(float(value))
    assert all(np.isfinite(x) for x in statistics.values(told).values())
    assert np.isfinite(np.square(np.asarray(gradient))).all()
