"""Policy-gradient losses of one token: their inputs, and PPO's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.importance import clipped_difference, of_sequences
from services.trainer.models.attention import Packing
from shared.algorithm_base import ClippedSection


class Tokens(NamedTuple):
    """Inputs of a surrogate, float32 [B, T], 0 at masked tokens; only `logprobs` has a gradient.

    `logprobs` is of the present policy, `behaviour` of the one that sampled. `old` is the denominator of ratios: the
    behaviour or, with a correction (see `importance`), the trainer's policy at the start of the step. `reference` is
    the policy at step 0, None if the algorithm needs none. `staleness` is the number of steps between the weights that
    sampled a token and those before this step; None unless the algorithm needs it.
    """

    logprobs: jax.Array
    old: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    mask: jax.Array
    packing: Packing | None = None
    reference: jax.Array | None = None
    staleness: jax.Array | None = None

    def ratio(self) -> jax.Array:
        """Compute present / old of each token, finite for any log-probabilities."""
        return jnp.exp(clipped_difference(self.logprobs, self.old))

    def sequence_sum(self, x: jax.Array) -> jax.Array:
        """Sum x [B, T] over the sampled tokens of each token's sequence: [B, T]."""
        return jnp.broadcast_to(of_sequences(jnp.where(self.mask > 0, x, 0.0), self.packing), self.mask.shape)

    def sequence_mean(self, x: jax.Array) -> jax.Array:
        """Average x [B, T] over the sampled tokens of each token's sequence: [B, T]."""
        return self.sequence_sum(x) / jnp.maximum(self.sequence_sum(self.mask), 1.0)


class TokenLoss(NamedTuple):
    """Loss float32 [B, T], ratios float32 [B, T], and bool [B, T]: true where a bound applies."""

    loss: jax.Array
    ratio: jax.Array
    is_clipped: jax.Array


type Surrogate = Callable[[Tokens], TokenLoss]


@dataclass(frozen=True, slots=True)
class Clip:
    """Clips ratios to [1 - `low`, 1 + `high`]; None does not clip.

    `dual` c > 1 also limits the loss of a token with negative advantage A to -c A (dual clip, arXiv:1912.09729).
    """

    low: float | None
    high: float | None
    dual: float | None = None

    @classmethod
    def of(cls, section: ClippedSection) -> Self:
        high = section.epsilon if section.epsilon is None or section.epsilon_high is None else section.epsilon_high
        return cls(section.epsilon, high, section.epsilon_c)

    def bounded(self, ratio: jax.Array) -> jax.Array:
        low = None if self.low is None else 1 - self.low
        high = None if self.high is None else 1 + self.high
        return ratio if low is None and high is None else jnp.clip(ratio, low, high)

    def of_tokens(self, tokens: Tokens) -> TokenLoss:
        """Compute PPO's loss of the tokens' own ratios."""
        return self.of_ratio(tokens.ratio(), tokens.advantages)

    def of_ratio(self, ratio: jax.Array, advantages: jax.Array) -> TokenLoss:
        """Compute PPO's clipped loss (arXiv:1707.06347, eq. 7) from ratios and advantages [B, T]."""
        free = -advantages * ratio
        held = -advantages * self.bounded(ratio)
        loss, is_clipped = jnp.maximum(free, held), held > free
        if self.dual is not None:
            most = -advantages * self.dual
            is_dual = (advantages < 0) & (loss > most)
            loss, is_clipped = jnp.where(is_dual, most, loss), is_clipped | is_dual
        return TokenLoss(loss, ratio, is_clipped)
