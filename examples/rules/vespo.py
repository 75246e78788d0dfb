"""VESPO (arXiv:2602.10693): REINFORCE, weighted by a soft function of the whole answer's probability ratio w,

    phi(w) = e^lambda w^k e^(-lambda w),    k, lambda = 2, 3 if A >= 0, else 3, 2

which is 1 on policy and fades on both sides. The loss of a token is -stop_gradient(phi(w)) A log p.

    volley train --config configs/quickstart.yaml algorithm.loss=examples/rules/vespo.py:loss
"""

import jax
import jax.numpy as jnp


def loss(tokens):
    log_w = tokens.sequence_sum(jnp.clip(tokens.logprobs - tokens.old, -20, 20))
    log_w = jnp.clip(log_w, jnp.log(1e-8), 20)
    rises = tokens.advantages >= 0
    k, decay = jnp.where(rises, 2.0, 3.0), jnp.where(rises, 3.0, 2.0)
    phi = jnp.exp(decay + k * log_w - decay * jnp.exp(log_w))
    return -jax.lax.stop_gradient(phi) * tokens.advantages * tokens.logprobs
