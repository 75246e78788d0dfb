"""Divergence of two policies at the sampled token: that token against all others, a distribution of two events.

D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) for the token's probabilities p and q: a lower bound of the KL
of the whole distributions that needs no others of their probabilities (DPPO's Binary-KL, arXiv:2602.04879).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.importance import clipped_difference

_LEAST = 1e-7
"""Least probability of either event, the resolution of float32 near 1."""


def probability_change(logprobs: jax.Array, behaviour: jax.Array) -> jax.Array:
    """Compute p - q, float32 [B, T], from log-probabilities: its size is the total variation of the two events."""
    return jnp.exp(logprobs) - jnp.exp(behaviour)


def binary_kl(logprobs: jax.Array, behaviour: jax.Array) -> jax.Array:
    """Compute D(p || q), float32 [B, T], 0 or more, from log-probabilities of p and q; finite for any."""
    log_p, log_q = (jnp.clip(x, jnp.log(_LEAST), jnp.log1p(-_LEAST)) for x in (logprobs, behaviour))
    p, rest_p, rest_q = jnp.exp(log_p), -jnp.expm1(log_p), -jnp.expm1(log_q)
    return jnp.maximum(p * (log_p - log_q) + rest_p * (jnp.log(rest_p) - jnp.log(rest_q)), 0.0)


def squared_distance(ahead: jax.Array, behind: jax.Array) -> jax.Array:
    """Compute log(ahead / behind)^2 [B, T], finite; beyond 20 nats it has no gradient."""
    return jnp.square(clipped_difference(ahead, behind))
