"""REINFORCE without some of the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens


def masked_reinforce(tokens: Tokens, weight: jax.Array, keep: jax.Array) -> TokenLoss:
    """Compute REINFORCE weighted by ratios [B, T]: -weight A log p, and 0 where `keep`, bool [B, T], is false.

    Neither weight nor mask has a gradient. A masked token stays in the loss's denominator.
    """
    weight = jax.lax.stop_gradient(jnp.where(keep, weight, 0.0))
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, tokens.ratio(), jax.lax.stop_gradient(~keep))
