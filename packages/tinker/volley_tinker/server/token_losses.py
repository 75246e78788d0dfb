"""Losses on given tokens, as clients of Tinker's interface name them. A loss is a sum over tokens, never a mean.

With p the model's probability of a target token, q that of the sampler, A its advantage, r = p / q:

    cross_entropy         -w log p                                       (w: the token's weight)
    importance_sampling   -r A                                           (arXiv:2204.05632, eq. 2)
    ppo                   -min(r A, clip(r, low, high) A)                (arXiv:1707.06347, eq. 7)
    cispo                 -stop_gradient(clip(r, low, high)) A log p     (arXiv:2506.13585, eq. 4)
    dro                   -(A log p - beta / 2 (log r)^2)                (arXiv:2405.19107)

log r is clipped to ±20 before r is computed, so that r is finite; `dro` takes it as it is, as Tinker documents. `low`
and `high` are bounds of the ratio itself, not distances from 1. A client's own loss is `cross_entropy` twice: a forward
pass for log-probabilities, then one with the weights -dL/dlog p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms.importance import clipped_difference
from services.trainer.algorithms.terms.logprobs import TokenScores


@dataclass(frozen=True)
class TokenBatch:
    """Given tokens of B rows and T positions, right-padded; a pytree for JAX.

    ids, targets: int32 [B, T]; position t predicts targets[:, t].
    weights: float32 [B, T], of cross_entropy; 0 at padding. The other losses leave out tokens of weight 0.
    behaviour, advantages: float32 [B, T].
    low, high: float32 [B, T], bounds of the ratio.
    beta: float32 [B, 1].
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    low: np.ndarray
    high: np.ndarray
    beta: np.ndarray

    @property
    def packing(self) -> None:
        """A row is one sequence."""

    @property
    def routed(self) -> None:
        """Routers choose the experts."""


ARRAYS = ("weights", "behaviour", "advantages", "low", "high")
jax.tree_util.register_dataclass(TokenBatch, data_fields=["ids", "targets", *ARRAYS, "beta"], meta_fields=[])


@dataclass(frozen=True, slots=True)
class LossDefinition:
    """A loss: its value per token, float32 [B, T], and its inputs and settings with their defaults.

    An input without a default (None) is required.
    """

    value: Callable[[jax.Array, TokenBatch], jax.Array]
    inputs: Mapping[str, float | None]
    settings: Mapping[str, float]


def _log_ratio(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    return jnp.where(batch.weights != 0, clipped_difference(logprobs, batch.behaviour), 0.0)


def _cross_entropy(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    return -logprobs


def _importance_sampling(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    return -jnp.exp(_log_ratio(logprobs, batch)) * batch.advantages


def _ppo(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    ratio = jnp.exp(_log_ratio(logprobs, batch))
    held = jnp.clip(ratio, batch.low, batch.high)
    return -jnp.minimum(ratio * batch.advantages, held * batch.advantages)


def _cispo(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    weight = jnp.clip(jnp.exp(_log_ratio(logprobs, batch)), batch.low, batch.high)
    return -jax.lax.stop_gradient(weight) * batch.advantages * logprobs


def _dro(logprobs: jax.Array, batch: TokenBatch) -> jax.Array:
    difference = jnp.where(batch.weights != 0, logprobs - batch.behaviour, 0.0)
    return -(batch.advantages * logprobs - 0.5 * batch.beta * jnp.square(difference))


_SAMPLED: Mapping[str, float | None] = {"logprobs": None, "advantages": None, "weights": 1.0}
_CLIPPED: Mapping[str, float | None] = {**_SAMPLED, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, LossDefinition] = {
    "cross_entropy": LossDefinition(_cross_entropy, {"weights": 1.0}, {}),
    "importance_sampling": LossDefinition(_importance_sampling, _SAMPLED, {}),
    "ppo": LossDefinition(_ppo, _CLIPPED, _THRESHOLDS),
    "cispo": LossDefinition(_cispo, _CLIPPED, _THRESHOLDS),
    "dro": LossDefinition(_dro, _SAMPLED, {"beta": 0.05}),
}


def token_loss(name: str) -> Callable[[TokenScores, TokenBatch], tuple[jax.Array, jax.Array]]:
    """Make a function of scores and batch: the loss, float32 scalar, and the log-probabilities, float32 [B, T]."""
    value = LOSSES[name].value

    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
        logprobs = jnp.where(batch.weights != 0, scores.logprobs, 0.0)
        per_token = value(logprobs, batch) * batch.weights
        return per_token.sum(), jax.lax.stop_gradient(scores.logprobs)

    return loss
