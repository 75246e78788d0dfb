"""DAPO (arXiv:2503.14476): GRPO's advantages with a higher upper bound of the ratio (`epsilon_high`), so that rare
tokens can grow; equal weight for every token of the step (`token-mean`); and a soft penalty for overlong episodes (see
`Overlong`). Its fourth part, dynamic sampling, replaces groups of equal rewards: a filter, not part of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.trainer.algorithms.terms.policy_gradient import Clipped, RewardOptions
from volley_algorithms.estimators import Estimated
from volley_algorithms.sections import DapoSection


@dataclass(frozen=True, slots=True)
class Overlong:
    """Soft overlong penalty (the paper's eq. 13).

    It grows linearly from 0 at `longest` - `buffer` sampled tokens to `penalty` at `longest`, and stays there.
    """

    longest: int
    buffer: int
    penalty: float

    def of(self, n_sampled: int) -> float:
        """Compute the term to add to the reward, 0 or less."""
        over = n_sampled - (self.longest - self.buffer)
        return -self.penalty * min(1.0, max(0.0, over / self.buffer))


class Dapo(Estimated[DapoSection], Clipped[DapoSection]):
    """GRPO with a penalty for overlong episodes; the other differences are defaults of its section."""

    def reward_options(self, max_response_length: int) -> RewardOptions:
        section, options = self.section, super().reward_options(max_response_length)
        if section.overlong_buffer is None:
            return options
        longest = section.overlong_length or max_response_length
        return replace(options, penalty=Overlong(longest, section.overlong_buffer, section.overlong_penalty).of)
