"""The losses: GRPO family and supervised, on per-token log-probabilities.

Denominators come with the batch (`row_weight`), so nothing here depends on how a step is cut into micro-batches, and
every statistic is a sum over tokens that adds up across them, or, where its name ends in `_max`, a maximum. Sources:
GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783, GSPO-token arXiv:2507.18071; estimator and
option names are Tunix's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from services.trainer.learner.batch import Batch
from services.trainer.learner.logprobs import TokenScores

Sums = dict[str, jax.Array]
LossAlgo = Literal["grpo", "gspo-token"]
KlMode = Literal["kl", "mse_kl", "low_var_kl"]

GRPO_SUMS = ("tokens", "current_tokens", "delta", "delta_current", "delta_current_max", "clipped", "entropy", "kl")
SUPERVISED_SUMS = ("tokens", "nll")

_MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0
_NEAR = 0.125

jax.tree_util.register_dataclass(
    Batch,
    data_fields=["ids", "targets", "mask", "behaviour", "advantages", "current", "row_weight", "reference", "old"],
    meta_fields=[],
)


@dataclass(frozen=True, slots=True)
class GrpoOptions:
    """`sampler_is_threshold` turns truncated importance sampling on; None leaves it off."""

    epsilon: float
    epsilon_high: float
    beta: float
    loss_algo: LossAlgo
    kl_loss_mode: KlMode
    sampler_is_threshold: float | None


def supervised_loss(scores: TokenScores, batch: Batch) -> tuple[jax.Array, Sums]:
    """Negative log-likelihood of the targets, float32 scalar, and the sums `tokens` and `nll`."""
    nll = -jnp.where(batch.mask > 0, scores.logprobs, 0.0)
    return (nll * _weights(batch)).sum(), {"tokens": batch.mask.sum(), "nll": nll.sum()}


def grpo_loss(scores: TokenScores, batch: Batch, options: GrpoOptions) -> tuple[jax.Array, Sums]:
    """Clipped policy-gradient loss with optional KL penalty, float32 scalar, and sums over trainable tokens.

    Old log-probabilities are the behaviour's; with truncated importance sampling they are the trainer's at the start of
    the step (`batch.old`, or the present ones when there is one update a step), and every token's loss is weighted by
    min(exp(old - behaviour), threshold).
    """
    mask = batch.mask
    logprobs, behaviour = _masked(scores.logprobs, mask), _masked(batch.behaviour, mask)
    old, importance = behaviour, jnp.ones_like(mask)
    if options.sampler_is_threshold is not None:
        old = jax.lax.stop_gradient(logprobs) if batch.old is None else _masked(batch.old, mask)
        importance = jnp.minimum(jnp.exp(_clip_log(old - behaviour)), options.sampler_is_threshold)
    ratio = jnp.exp(_log_ratio(logprobs, old, mask, options.loss_algo))
    free = -batch.advantages * ratio
    clipped = -batch.advantages * jnp.clip(ratio, 1 - options.epsilon, 1 + options.epsilon_high)
    per_token = jnp.maximum(free, clipped) * importance
    sums = _sums(logprobs, behaviour, scores.entropy, clipped > free, batch)
    if options.beta and batch.reference is not None:
        kl = _kl(logprobs, _masked(batch.reference, mask), options.kl_loss_mode)
        per_token = per_token + options.beta * kl
        sums["kl"] = (kl * mask).sum()
    return (per_token * _weights(batch)).sum(), sums


def _log_ratio(logprobs: jax.Array, old: jax.Array, mask: jax.Array, algo: LossAlgo) -> jax.Array:
    token = _clip_log(logprobs - old)
    if algo == "grpo":
        return token
    mean = (token * mask).sum(-1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1.0)
    sequence = logprobs - jax.lax.stop_gradient(logprobs) + jax.lax.stop_gradient(mean)
    return jnp.minimum(sequence, _MAX_SEQUENCE_LOG_RATIO)


def _kl(logprobs: jax.Array, reference: jax.Array, mode: KlMode) -> jax.Array:
    """Per-token estimators of KL(policy || reference) after Schulman: k1, k2 and k3.

    k3, exp(d) - d - 1 of the difference d in nats, overflows float32 beyond 88, and so does the square of its gradient
    beyond 44. Near 0 its terms cancel, so there it is the beginning of its series, of which d^7/7! is the first term
    left out. Above `_MAX_LOG_RATIO` it goes on as its tangent: the same slope, so a token that far from the reference
    is still drawn back. (verl clips d to the same 20, and the value to 10; Tunix' optional clamp is of the value. A
    clip has no gradient: the token would be free.)
    """
    difference = reference - logprobs
    if mode == "kl":
        return -difference
    if mode == "mse_kl":
        return 0.5 * jnp.square(difference)
    is_near = jnp.abs(difference) < _NEAR
    d = jnp.where(is_near, difference, 0.0)
    near = jnp.square(d) * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    bounded = jnp.where(difference > _MAX_LOG_RATIO, _MAX_LOG_RATIO, difference)
    slope = math.exp(_MAX_LOG_RATIO) - 1.0
    tangent = slope - _MAX_LOG_RATIO + slope * (difference - _MAX_LOG_RATIO)
    far = jnp.where(difference > _MAX_LOG_RATIO, tangent, jnp.expm1(bounded) - bounded)
    return jnp.where(is_near, near, far)


def _sums(logprobs: jax.Array, behaviour: jax.Array, entropy: jax.Array, is_clipped: jax.Array, batch: Batch) -> Sums:
    mask = batch.mask
    delta = jnp.abs(logprobs - behaviour)
    return {
        "tokens": mask.sum(),
        "current_tokens": batch.current.sum(),
        "delta": (delta * mask).sum(),
        "delta_current": (delta * batch.current).sum(),
        "delta_current_max": (delta * batch.current).max(),
        "clipped": (is_clipped * mask).sum(),
        "entropy": (_masked(entropy, mask)).sum(),
        "kl": jnp.zeros(()),
    }


def _weights(batch: Batch) -> jax.Array:
    return batch.mask * batch.row_weight[:, None]


def _masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Zero at positions that do not count: what stands there may be anything, NaN included."""
    return jnp.where(mask > 0, x, 0.0)


def _clip_log(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
