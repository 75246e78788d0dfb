"""DPPO (arXiv:2602.04879): a trust region of probabilities, not of ratios. With the probability p of the sampled token,
and q at the sampler, its loss is

    -stop_gradient(M min(p / q, ratio_cap)) A log p

where M is 0 if the update leads away from the sampler's policy further than the bound, and otherwise 1: with A > 0, if
p > q and the divergence exceeds `epsilon_high`; with A < 0, if p < q and it exceeds `epsilon`. The divergence is

    tv: |p - q|        kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))

of two events, this token and any other. A ratio bound forbids rare tokens to grow and lets frequent ones shrink far.
`kl_tau` adds kl_tau (log p - log q)^2 for every token, masked or not: prime-rl's default loss is `tv` with bounds of
0.2 and a `kl_tau` of 1e-3 (its term is that of Kimi-K2.5, arXiv:2602.02276).

Sources: equations and appendix of the paper; verl 0.9.1 `core_algos.compute_policy_loss_dppo_tv` and `…_kl`; prime-rl
`trainer/rl/loss.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from volley_algorithms.divergence import binary_kl, probability_change, squared_distance
from volley_algorithms.estimators import Estimated
from volley_algorithms.masked import masked_reinforce
from volley_algorithms.sections import DppoSection


class Dppo(Estimated[DppoSection]):
    """GRPO whose trust region bounds the change of a token's probability."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        section = self.section
        made = masked_reinforce(tokens, jnp.minimum(tokens.ratio(), section.ratio_cap), self._is_kept(tokens))
        return made._replace(loss=made.loss + section.kl_tau * squared_distance(tokens.logprobs, tokens.behaviour))

    def _is_kept(self, tokens: Tokens) -> jax.Array:
        change = probability_change(tokens.logprobs, tokens.behaviour)
        by_tv = self.section.divergence == "tv"
        divergence = jnp.abs(change) if by_tv else binary_kl(tokens.behaviour, tokens.logprobs)
        low, high = self.section.bounds
        leaves_up, leaves_down = (change > 0) & (divergence > high), (change < 0) & (divergence > low)
        return ~jnp.where(tokens.advantages > 0, leaves_up, leaves_down)
