"""KPop (Guo et al., Ant Group 2026, ringtech.notion.site/kpop): a mask by divergence in both directions. With the
probabilities p of the sampled token and q at the sampler, its loss is

    -stop_gradient(M p / q) A log p,    M = 1 if max(D(p || q), D(q || p)) <= epsilon, else 0

where D is the KL divergence of two events, this token and any other. Unlike DPPO's, the mask does not look at the
advantage: also a token that the update would bring back is left out. Bounds of the ratio (IcePop, arXiv:2510.18855) are
too tight for rare tokens and too wide for frequent ones. `kl_tau` as in DPPO.

Sources: AReaL `rejection_sampling.metric=binary_kl` and prime-rl's pull request 3283, which quotes the paper's bound of
0.1 (AReaL's example: 2). In AReaL the mask is that of the policy at the start of the step; here, as in prime-rl, of the
present one: the same with one update a step.
"""

from __future__ import annotations

import jax.numpy as jnp

from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from volley_algorithms.divergence import binary_kl, squared_distance
from volley_algorithms.estimators import Estimated
from volley_algorithms.masked import masked_reinforce
from volley_algorithms.sections import KpopSection


class Kpop(Estimated[KpopSection]):
    """GRPO without tokens at which trainer and sampler disagree."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        p, q = tokens.logprobs, tokens.behaviour
        keep = jnp.maximum(binary_kl(p, q), binary_kl(q, p)) <= self.section.epsilon
        made = masked_reinforce(tokens, tokens.ratio(), keep)
        return made._replace(loss=made.loss + self.section.kl_tau * squared_distance(p, q))
