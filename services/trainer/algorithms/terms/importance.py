"""Data of an older or differently computed policy: ratios of probabilities, weights that correct for them, and masks
that leave out what cannot be corrected.

Names: *behaviour* sampled the tokens (the engine's log-probabilities), *old* is the policy at the start of the step as
the trainer computes it, *present* the one being differentiated. A loss whose ratio is present / old and whose weight is
old / behaviour is decoupled PPO (arXiv:2505.24298); with the weight truncated it is truncated importance sampling (TIS,
as in verl and Tunix), with a mask it is masked importance sampling (MIS).

Invariant: differences of log-probabilities are clipped to ±20 nats before they are exponentiated, so ratios are finite
in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from services.trainer.models.attention import Packing

Level = Literal["none", "token", "sequence"]
RejectionLevel = Literal["none", "token", "sequence", "geometric"]
_MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class Correction:
    """`level` of the weight min(ratio, `threshold`): the ratio old / behaviour of a token, or the product of those of a
    sequence. `rejection` takes tokens (or whole sequences, by the product or by the geometric mean of their ratios)
    whose ratio is outside `bounds` out of the surrogate: they still count in its denominators, and keep their KL
    penalty and entropy bonus.
    """

    level: Level = "none"
    threshold: float = 2.0
    rejection: RejectionLevel = "none"
    bounds: tuple[float, float] = (0.5, 2.0)

    @property
    def needs_old(self) -> bool:
        return self.level != "none" or self.rejection != "none"


NONE = Correction()


def clipped_difference(ahead: jax.Array, behind: jax.Array) -> jax.Array:
    """log(ahead / behind) [B, T] from log-probabilities, within ±20."""
    return jnp.clip(ahead - behind, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def of_sequences(x: jax.Array, packing: Packing | None) -> jax.Array:
    """The sum of x [B, T] over each token's sequence: [B, 1] where a row is one, else [B, T]. What does not count is 0
    in x.
    """
    if packing is None:
        return x.sum(-1, keepdims=True)

    def of_row(row: jax.Array, sequences: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, sequences, len(row))[sequences]

    return jax.vmap(of_row)(x, packing.sequences)


def sequence_ratio(logprobs: jax.Array, old: jax.Array, mask: jax.Array, packing: Packing | None = None) -> jax.Array:
    """GSPO-token's ratio float32 [B, T] (arXiv:2507.18071, eq. 14): its value at every token is the geometric mean of
    the sequence's ratios, its gradient that of the token's own log-probability.
    """
    token = clipped_difference(logprobs, old)
    mean = of_sequences(token * mask, packing) / jnp.maximum(of_sequences(mask, packing), 1.0)
    sequence = logprobs - jax.lax.stop_gradient(logprobs) + jax.lax.stop_gradient(mean)
    return jnp.exp(jnp.minimum(sequence, _MAX_SEQUENCE_LOG_RATIO))


def weights(
    old: jax.Array, behaviour: jax.Array, mask: jax.Array, correction: Correction, packing: Packing | None = None
) -> jax.Array:
    """float32 [B, T], no gradient: what each token's loss is multiplied by; of log-probabilities [B, T], which are 0
    where mask is.
    """
    difference = jax.lax.stop_gradient(clipped_difference(old, behaviour)) * mask
    made = jnp.ones_like(mask)
    if correction.level != "none":
        made = jnp.minimum(_ratio(difference, mask, correction.level, packing), correction.threshold)
    if correction.rejection != "none":
        ratio = _ratio(difference, mask, correction.rejection, packing)
        low, high = correction.bounds
        made = jnp.where((ratio >= low) & (ratio <= high), made, 0.0)
    return jnp.broadcast_to(made, mask.shape)


def _ratio(difference: jax.Array, mask: jax.Array, level: Level | RejectionLevel, packing: Packing | None) -> jax.Array:
    if level == "token":
        return jnp.exp(difference)
    total = of_sequences(difference, packing)
    if level == "geometric":
        total = total / jnp.maximum(of_sequences(mask, packing), 1.0)
    return jnp.exp(jnp.clip(total, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
