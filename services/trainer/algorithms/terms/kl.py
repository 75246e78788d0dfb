"""Per-token estimators of the KL divergence between policy and reference."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

KlMode = Literal["kl", "mse_kl", "low_var_kl"]

_NEAR = 0.125
_MOST = 20.0


def estimate(logprobs: jax.Array, reference: jax.Array, mode: KlMode) -> jax.Array:
    """Estimate KL(policy || reference) per token, float32 [B, T], from log-probabilities [B, T].

    Estimators after Schulman (joschu.net/blog/kl-approx.html): k1 (`kl`), k2 (`mse_kl`) and k3 (`low_var_kl`).

    k3, exp(d) - d - 1 of the difference d in nats, overflows float32 for d > 88, and the square of its gradient for
    d > 44. Near 0 its terms cancel, so it is computed from its series; the first omitted term is d^7/7!. Above 20 it
    continues as its tangent, whose slope still pulls the token back to the reference. (verl clips d to the same 20, and
    the value to 10; Tunix' optional clamp is of the value. A clipped value has no gradient.)
    """
    difference = reference - logprobs
    if mode == "kl":
        return -difference
    if mode == "mse_kl":
        return 0.5 * jnp.square(difference)
    is_near = jnp.abs(difference) < _NEAR
    d = jnp.where(is_near, difference, 0.0)
    near = jnp.square(d) * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    bounded = jnp.where(difference > _MOST, _MOST, difference)
    slope = math.exp(_MOST) - 1.0
    tangent = slope - _MOST + slope * (difference - _MOST)
    far = jnp.where(difference > _MOST, tangent, jnp.expm1(bounded) - bounded)
    return jnp.where(is_near, near, far)
