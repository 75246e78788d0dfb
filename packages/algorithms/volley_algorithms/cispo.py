"""CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE weighted by the clipped ratio,

    loss = -stop_gradient(clip(ratio, 1 - epsilon, 1 + epsilon_high)) A log p

so every token keeps a gradient: PPO's clipping drops the gradients of rare tokens at which reasoning changes course.
"""

from __future__ import annotations

import jax

from services.trainer.algorithms.terms.surrogate import Clip, TokenLoss, Tokens
from volley_algorithms.estimators import Estimated
from volley_algorithms.sections import CispoSection


class Cispo(Estimated[CispoSection]):
    """GRPO with clipped importance weights in place of a clipped objective."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        """Compute equation 4 of the paper. The ratio has no gradient, so clipping removes no token's gradient."""
        ratio = tokens.ratio()
        weight = jax.lax.stop_gradient(Clip.of(self.section).bounded(ratio))
        loss = -weight * tokens.advantages * tokens.logprobs
        return TokenLoss(loss, ratio, jax.lax.stop_gradient(weight != ratio))
