"""LUSPO (arXiv:2602.05261): GSPO's clipped loss times the length of the answer, which GSPO's mean divides away.

    volley train --config configs/quickstart.yaml \
        algorithm.loss=examples/rules/luspo.py:loss algorithm.loss_agg_mode=sequence-mean-token-mean
"""

import jax.numpy as jnp


def loss(tokens):
    log_ratio = jnp.clip(tokens.logprobs - tokens.old, -20, 20)
    ratio = jnp.exp(tokens.sequence_mean(log_ratio))
    kept = jnp.clip(ratio, 1 - 2e-3, 1 + 2.5e-3)
    length = tokens.sequence_sum(tokens.mask)
    return -length * jnp.minimum(ratio * tokens.advantages, kept * tokens.advantages)
