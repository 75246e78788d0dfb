"""SAO (single-rollout asynchronous optimization, arXiv:2607.07508): PPO for data that may be many versions old.

- One episode a task (`grpo_config.num_generations: 1`): no episode waits for the others of a group. The baseline is a
  critic's.
- Direct double-sided importance sampling: with the ratio r of the present policy to the *sampler*, without a policy of
  the step's start between them, a token's loss is

      -stop_gradient(f(r)) A log p,    f(r) = r if 1 - epsilon < r < 1 + epsilon_high, else 0

  Tokens outside are masked, not clipped, on both sides whatever the sign of A. They stay in the denominator.
- The critic takes K updates for one of the policy (`critic_updates: 2`), and its attention stays that of the initial
  weights (`critic_frozen: attention`).
- GAE skips the environment's tokens, as everywhere here: the next sampled token follows (see `ppo`). lambda is
  1 - 1 / (1.5 l) for the policy and 1 for the critic's targets.

This rests on secondary sources, which quote the paper's equations and numbers; it was compared with neither the paper
nor code of its authors. The sources do not say whether f has a gradient (here not, as in CISPO: the objective is
printed with log p), whether advantages are whitened (default: no), and of which form the value loss is (here PPO's
without clipping). Bounds are 0.3 and 5 for mathematics, 0.8 and 3 for coding; learning rates 1e-6 for the policy, 5e-6
for the critic.
"""

from __future__ import annotations

from services.trainer.algorithms.ppo import WithCritic
from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from volley_algorithms.masked import masked_reinforce
from volley_algorithms.sections import SaoSection


class Sao(WithCritic[SaoSection]):
    """Masked REINFORCE on advantages from a critic."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        ratio, section = tokens.ratio(), self.section
        keep = (ratio > 1.0 - section.epsilon) & (ratio < 1.0 + section.epsilon_high)
        return masked_reinforce(tokens, ratio, keep)
