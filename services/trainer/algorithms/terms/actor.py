"""Policy loss of all policy-gradient algorithms.

A surrogate of ratio and advantage, corrected for off-policy data, with a KL penalty and an entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms import importance, kl, statistics, surrogate
from services.trainer.algorithms.terms.importance import NONE, Correction
from services.trainer.algorithms.terms.kl import KlMode
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistic, Statistics
from services.trainer.algorithms.terms.surrogate import Clip
from services.trainer.batches.batch import Batch
from shared.algorithm_schema import PolicyGradientSection


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Options of the policy loss.

    `ratio` is of tokens, or of whole sequences (GSPO); `surrogate` is PPO's (`clipped`) or CISPO's (`weighted`). `beta`
    and `kl_mode` belong to the KL penalty in the loss.
    """

    clip: Clip
    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clipped", "weighted"] = "clipped"
    correction: Correction = NONE
    beta: float = 0.0
    kl_mode: KlMode = "low_var_kl"
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, section: PolicyGradientSection) -> Self:
        """Read the options that all algorithms share from a section of the configuration."""
        high = section.epsilon if section.epsilon is None or section.epsilon_high is None else section.epsilon_high
        return cls(
            clip=Clip(section.epsilon, high, section.epsilon_c),
            correction=Correction(
                section.sampler_is, section.sampler_is_threshold, section.sampler_rs, section.sampler_rs_bounds
            ),
            beta=section.beta if section.kl_in == "loss" else 0.0,
            kl_mode=section.kl_loss_mode,
            entropy_coef=section.entropy_coef,
        )


def actor_loss(scores: TokenScores, batch: Batch, options: ActorOptions) -> tuple[jax.Array, Statistics]:
    """Compute the loss, float32 scalar, and statistics over trainable tokens.

    loss = sum over tokens of batch.weight * (correction * surrogate(ratio, A) + beta * KL - entropy_coef * entropy).

    Without a correction, the ratio's denominator is the behaviour's probability. With one it is the trainer's at the
    start of the step (`batch.old`, or the present one if there is one update a step).
    """
    mask = batch.mask
    logprobs, behaviour = _masked(scores.logprobs, mask), _masked(batch.behaviour, mask)
    old, weights = behaviour, jnp.ones_like(mask)
    if options.correction.needs_old:
        old = jax.lax.stop_gradient(logprobs) if batch.old is None else _masked(batch.old, mask)
        weights = importance.weights(old, behaviour, mask, options.correction, batch.packing)
    ratio = _ratio(logprobs, old, batch, options)
    if options.surrogate == "clipped":
        per_token, is_clipped = surrogate.clipped(ratio, batch.advantages, options.clip)
    else:
        per_token, is_clipped = surrogate.weighted(logprobs, ratio, batch.advantages, options.clip)
    per_token = per_token * weights
    penalty = jnp.zeros_like(mask)
    if batch.reference is not None:
        penalty = kl.estimate(logprobs, _masked(batch.reference, mask), options.kl_mode)
        per_token = per_token + options.beta * penalty
    if options.entropy_coef:
        per_token = per_token - options.entropy_coef * _masked(scores.entropy, mask)
    loss = (per_token * mask * batch.weight).sum()
    return loss, _statistics(scores, batch, logprobs, behaviour) | {
        "kl": statistics.mean(penalty, mask),
        "clip_fraction": statistics.mean(is_clipped, mask),
        "clip_fraction_low": statistics.mean(is_clipped & (ratio < 1), mask),
        "clip_fraction_high": statistics.mean(is_clipped & (ratio > 1), mask),
        **(_of_weights(weights, mask) if options.correction.needs_old else {}),
    }


def _ratio(logprobs: jax.Array, old: jax.Array, batch: Batch, options: ActorOptions) -> jax.Array:
    if options.ratio == "sequence":
        return importance.sequence_ratio(logprobs, old, batch.mask, batch.packing)
    return jnp.exp(importance.clipped_difference(logprobs, old))


def _statistics(scores: TokenScores, batch: Batch, logprobs: jax.Array, behaviour: jax.Array) -> dict[str, Statistic]:
    delta = jnp.abs(logprobs - behaviour)
    return {
        "tokens": statistics.total(batch.mask),
        "logprob_abs_diff": statistics.mean(delta, batch.mask),
        "logprob_abs_diff_current": statistics.mean(delta, batch.current),
        "logprob_abs_diff_current_max": statistics.largest(delta, batch.current),
        "entropy": statistics.mean(jax.lax.stop_gradient(scores.entropy), batch.mask),
    }


def _of_weights(weights: jax.Array, mask: jax.Array) -> dict[str, Statistic]:
    return {
        "importance_weight": statistics.mean(weights, mask),
        "effective_share": statistics.effective_share(weights, mask),
        "rejected_fraction": statistics.mean(weights == 0, mask),
    }


def _masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Set masked positions to 0; they may hold any value, NaN included."""
    return jnp.where(mask > 0, x, 0.0)
