"""GSPO (arXiv:2507.18071): ratio and advantage are both of whole sequences. For a sequence of n tokens

    s = (p(sequence) / p_old(sequence))^(1/n),    loss = mean over sequences of max(-A s, -A clip(s, 1 - eps, 1 + eps'))

in the form of the paper's GSPO-token, whose value and gradient are the same if all tokens of a sequence have the same
advantage. In an episode of several sequences each has its own ratio, over its own sampled tokens, because the ratio is
that of one answer to one context; all share the episode's advantage, and count together as one in the mean. A geometric
mean of ratios is much closer to 1 than a single ratio: epsilons are about 4e-4, not 0.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.importance import clipped_difference, of_sequences
from services.trainer.algorithms.terms.surrogate import Clip, TokenLoss, Tokens
from volley_algorithms.estimators import Estimated
from volley_algorithms.sections import GspoSection

_MOST_NATS = 10.0


class Gspo(Estimated[GspoSection]):
    """GRPO with one importance ratio for a whole sequence."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        return Clip.of(self.section).of_ratio(sequence_ratio(tokens), tokens.advantages)


def sequence_ratio(tokens: Tokens) -> jax.Array:
    """Compute GSPO-token's ratio float32 [B, T] (the paper's eq. 14).

    Its value at every token is the geometric mean of the sequence's ratios; its gradient is that of the token's own
    log-probability.
    """
    token = clipped_difference(tokens.logprobs, tokens.old)
    n = jnp.maximum(of_sequences(tokens.mask, tokens.packing), 1.0)
    mean = of_sequences(token * tokens.mask, tokens.packing) / n
    sequence = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs) + jax.lax.stop_gradient(mean)
    return jnp.exp(jnp.minimum(sequence, _MOST_NATS))
