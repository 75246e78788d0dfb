"""Policy-gradient losses of one token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Clip:
    """Clips ratios to [1 - `low`, 1 + `high`]; None does not clip.

    `dual` c > 1 also limits the loss of a token with negative advantage A to -c A (dual clip, arXiv:1912.09729).
    """

    low: float | None
    high: float | None
    dual: float | None = None

    def bounded(self, ratio: jax.Array) -> jax.Array:
        low = None if self.low is None else 1 - self.low
        high = None if self.high is None else 1 + self.high
        return ratio if low is None and high is None else jnp.clip(ratio, low, high)


def clipped(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """Compute PPO's clipped loss (arXiv:1707.06347, eq. 7) from ratios and advantages [B, T].

    Returns:
        Loss float32 [B, T], and bool [B, T]: true where the clip applies.
    """
    free = -advantages * ratio
    held = -advantages * clip.bounded(ratio)
    loss, is_clipped = jnp.maximum(free, held), held > free
    if clip.dual is not None:
        most = -advantages * clip.dual
        is_dual = (advantages < 0) & (loss > most)
        loss, is_clipped = jnp.where(is_dual, most, loss), is_clipped | is_dual
    return loss, is_clipped


def weighted(logprobs: jax.Array, ratio: jax.Array, advantages: jax.Array, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """Compute CISPO's loss (arXiv:2506.13585, eq. 4): REINFORCE weighted by the clipped ratio.

    The ratio has no gradient, so clipping removes no token's gradient.

    Returns:
        Loss float32 [B, T], and bool [B, T]: true where the clip applies.
    """
    weight = jax.lax.stop_gradient(clip.bounded(ratio))
    return -weight * advantages * logprobs, jax.lax.stop_gradient(weight != ratio)
