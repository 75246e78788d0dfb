"""SAPO (Qwen, arXiv:2511.20347): a soft gate in place of clipping. With the ratio r of a token, its loss is

    -A (4 / tau) sigmoid(tau (r - 1)),    tau = tau_pos if A > 0, else tau_neg

so the gradient's weight is that of PPO at r = 1 and fades with the distance from it, sooner for tokens with a negative
advantage (`tau_neg` > `tau_pos`), whose update raises all other tokens. The loss is averaged by sequence.

Sources: the paper's equations 5 and 6; verl 0.9.1 `core_algos.compute_policy_loss_sapo`, whose value and gradient these
are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from volley_algorithms.estimators import Estimated
from volley_algorithms.sections import SapoSection


class Sapo(Estimated[SapoSection]):
    """GRPO with a soft gate on ratios."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        ratio, section = tokens.ratio(), self.section
        tau = jnp.where(tokens.advantages > 0, section.tau_pos, section.tau_neg)
        gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
        return TokenLoss(-gate * tokens.advantages, ratio, jnp.zeros_like(ratio, bool))
