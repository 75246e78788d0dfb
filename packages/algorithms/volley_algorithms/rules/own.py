"""A loss and advantages of the user's own: functions of files that the configuration names (see `shared.own_rules`).

The loss replaces the clipped surrogate, and the advantages the estimator. All else is as for other algorithms: weights
of tokens (`loss_agg_mode`), corrections, KL penalty, entropy bonus, rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms.advantages import bounded
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, Needs
from services.trainer.algorithms.terms.policy_gradient import Clipped
from services.trainer.algorithms.terms.rewards import TokenRewards
from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from shared.rule_code import read
from volley_algorithms.estimators import Estimated
from volley_algorithms.rules.inputs import group_inputs
from volley_algorithms.rules.losses import loss_of
from volley_algorithms.rules.of_groups import advantage_of
from volley_algorithms.sections import OwnSection


class Own(Estimated[OwnSection], Clipped[OwnSection]):
    """The user's loss, advantages or both; GRPO where one is not given.

    Advantages and loss raise RuleFailed.
    """

    def __init__(self, section: OwnSection, n_updates: int, max_response_length: int) -> None:
        super().__init__(section, n_updates, max_response_length)
        self._loss = loss_of(read(section.loss)) if section.loss else None
        self._advantage = advantage_of(read(section.advantage)) if section.advantage else None

    @property
    def needs(self) -> Needs:
        return replace(super().needs, staleness=self.section.loss is not None)

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        if self._advantage is None:
            return super().compute_advantages(groups)
        return [self._of_group(group, made) for group, made in zip(groups, self.token_rewards(groups), strict=True)]

    def _of_group(self, group: EpisodeGroup, rewards: Sequence[TokenRewards]) -> list[np.ndarray]:
        assert self._advantage is not None
        references = [episode.reference for episode in group]
        made = self._advantage(group_inputs([episode.trajectory for episode in group], rewards, references))
        ends = np.cumsum([len(one) for one in made])[:-1]
        return np.split(bounded(np.concatenate(made)), ends)

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        if self._loss is None:
            return super().surrogate(tokens)
        return TokenLoss(self._loss(tokens), tokens.ratio(), jnp.zeros_like(tokens.mask, bool))
