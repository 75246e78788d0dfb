"""Off-policy corrections: probability ratios, importance weights, and rejection of tokens.

Names: *behaviour* sampled the tokens (the engine's log-probabilities), *old* is the policy at the start of the step as
the trainer computes it, *present* the policy being differentiated. A loss with ratio present / old and weight
old / behaviour is decoupled PPO (arXiv:2505.24298); with a truncated weight it is truncated importance sampling (TIS,
as in verl and Tunix), with a mask it is masked importance sampling (MIS).

Invariant: differences of log-probabilities are clipped to ±20 nats before exponentiation, so ratios are finite in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import jax
import jax.numpy as jnp

from services.trainer.models.attention import Packing
from shared.algorithm_base import PolicyGradientSection

Level = Literal["none", "token", "sequence"]
RejectionLevel = Literal["none", "token", "sequence", "geometric"]
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights and rejection by the ratio old / behaviour.

    The weight is min(ratio, `threshold`); by `level` the ratio is a token's, or the product of its sequence's ratios.
    `rejection` removes from the surrogate tokens, or whole sequences (by product or geometric mean of their ratios),
    whose ratio is outside `bounds`: they still count in its denominators, and keep KL penalty and entropy bonus.
    """

    level: Level = "none"
    threshold: float = 2.0
    rejection: RejectionLevel = "none"
    bounds: tuple[float, float] = (0.5, 2.0)

    @classmethod
    def of(cls, section: PolicyGradientSection) -> Self:
        """Read the correction of a section; those without its keys have none."""
        return cls(*section.correction)

    @property
    def needs_old(self) -> bool:
        return self.level != "none" or self.rejection != "none"


NONE = Correction()


def clipped_difference(ahead: jax.Array, behind: jax.Array) -> jax.Array:
    """Compute log(ahead / behind) [B, T] from log-probabilities, clipped to ±20."""
    return jnp.clip(ahead - behind, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def of_sequences(x: jax.Array, packing: Packing | None) -> jax.Array:
    """Sum x [B, T] over each token's sequence: [B, 1] if a row is one sequence, [B, T] if rows are packed.

    x must be 0 at masked tokens.
    """
    if packing is None:
        return x.sum(-1, keepdims=True)

    def of_row(row: jax.Array, sequences: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, sequences, len(row))[sequences]

    return jax.vmap(of_row)(x, packing.sequences)


@dataclass(frozen=True, slots=True)
class Weights:
    """Each token's weight in the loss, float32 [B, T]; bool [B, T] where the threshold capped it, and where it is 0."""

    weights: jax.Array
    is_truncated: jax.Array
    is_rejected: jax.Array


def weights(
    old: jax.Array, behaviour: jax.Array, mask: jax.Array, correction: Correction, packing: Packing | None = None
) -> Weights:
    """Compute the weights, without gradient. The log-probabilities [B, T] are 0 at masked tokens."""
    difference = jax.lax.stop_gradient(clipped_difference(old, behaviour)) * mask
    made, is_truncated, is_rejected = jnp.ones_like(mask), jnp.zeros_like(mask, bool), jnp.zeros_like(mask, bool)
    if correction.level != "none":
        ratio = _ratio(difference, mask, correction.level, packing)
        made, is_truncated = jnp.minimum(ratio, correction.threshold), ratio > correction.threshold
    if correction.rejection != "none":
        ratio = _ratio(difference, mask, correction.rejection, packing)
        low, high = correction.bounds
        is_rejected = ~((ratio >= low) & (ratio <= high))  # also if it is NaN
        made = jnp.where(is_rejected, 0.0, made)
    return Weights(*(jnp.broadcast_to(one, mask.shape) for one in (made, is_truncated, is_rejected)))


def _ratio(difference: jax.Array, mask: jax.Array, level: Level | RejectionLevel, packing: Packing | None) -> jax.Array:
    if level == "token":
        return jnp.exp(difference)
    total = of_sequences(difference, packing)
    if level == "geometric":
        total = total / jnp.maximum(of_sequences(mask, packing), 1.0)
    return jnp.exp(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
