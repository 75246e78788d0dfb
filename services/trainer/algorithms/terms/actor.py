"""Policy loss of all policy-gradient algorithms.

A surrogate of ratio and advantage, corrected for off-policy data, with a KL penalty and an entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms import importance, kl, statistics
from services.trainer.algorithms.terms.importance import NONE, Correction, Weights
from services.trainer.algorithms.terms.kl import KlMode
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistic, Statistics
from services.trainer.algorithms.terms.surrogate import Surrogate, TokenLoss, Tokens
from services.trainer.batches.batch import Batch
from shared.algorithm_base import PolicyGradientSection


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Options of the policy loss beside its surrogate; `beta` and `kl_mode` are of the KL penalty in the loss."""

    correction: Correction = NONE
    beta: float = 0.0
    kl_mode: KlMode = "low_var_kl"
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, section: PolicyGradientSection) -> Self:
        """Read the options that all algorithms share from a section of the configuration."""
        return cls(
            correction=Correction.of(section),
            beta=section.beta if section.kl_in == "loss" else 0.0,
            kl_mode=section.kl_loss_mode,
            entropy_coef=section.entropy_coef,
        )


def actor_loss(
    scores: TokenScores, batch: Batch, options: ActorOptions, surrogate: Surrogate
) -> tuple[jax.Array, Statistics]:
    """Compute the loss, float32 scalar, and statistics over trainable tokens.

    loss = sum over tokens of batch.weight * (correction * surrogate + beta * KL - entropy_coef * entropy).

    Without a correction, the ratio's denominator is the behaviour's probability. With one it is the trainer's at the
    start of the step (`batch.old`, or the present one if there is one update a step).
    """
    mask = batch.mask
    logprobs, behaviour, corrected, made = _tokens(scores, batch, options, surrogate)
    per_token, ratio, is_clipped = made
    weights = jnp.ones_like(mask) if corrected is None else corrected.weights
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


class TokenMasks(NamedTuple):
    """How the loss treats each token, [B, T]: bool, and the `weight` of its surrogate, float32.

    `is_clipped`: a bound of the surrogate applies. `is_truncated`: its importance weight is capped. `is_rejected`: the
    surrogate leaves it out.
    """

    is_clipped: jax.Array
    is_truncated: jax.Array
    is_rejected: jax.Array
    weight: jax.Array


def token_masks(scores: TokenScores, batch: Batch, options: ActorOptions, surrogate: Surrogate) -> TokenMasks:
    """Return the masks that `actor_loss` uses for the same arguments."""
    _, _, corrected, made = _tokens(scores, batch, options, surrogate)
    if corrected is None:
        none = jnp.zeros_like(batch.mask, bool)
        return TokenMasks(made.is_clipped, none, none, jnp.ones_like(batch.mask))
    return TokenMasks(made.is_clipped, corrected.is_truncated, corrected.is_rejected, corrected.weights)


def _tokens(
    scores: TokenScores, batch: Batch, options: ActorOptions, surrogate: Surrogate
) -> tuple[jax.Array, jax.Array, Weights | None, TokenLoss]:
    """Return the log-probabilities of policy and sampler, importance weights if corrected, and the surrogate."""
    mask = batch.mask
    logprobs, behaviour = _masked(scores.logprobs, mask), _masked(batch.behaviour, mask)
    old, corrected = behaviour, None
    if options.correction.needs_old:
        old = jax.lax.stop_gradient(logprobs) if batch.old is None else _masked(batch.old, mask)
        corrected = importance.weights(old, behaviour, mask, options.correction, batch.packing)
    reference = None if batch.reference is None else _masked(batch.reference, mask)
    tokens = Tokens(logprobs, old, behaviour, batch.advantages, mask, batch.packing, reference, batch.staleness)
    return logprobs, behaviour, corrected, surrogate(tokens)


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
