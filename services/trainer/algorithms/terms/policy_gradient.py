"""Base classes of policy-gradient algorithms: token rewards, advantages within a group, the actor's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import jax
import numpy as np

from services.trainer.algorithms.terms import rewards as token_rewards
from services.trainer.algorithms.terms.actor import ActorOptions, TokenMasks, actor_loss, token_masks
from services.trainer.algorithms.terms.added import added_terms
from services.trainer.algorithms.terms.advantages import Estimate, group_relative
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, EpisodeTokens, Needs
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.rewards import Credit, Normalization, TokenRewards
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.algorithms.terms.surrogate import Clip, TokenLoss, Tokens
from services.trainer.batches.batch import Batch
from shared.algorithm_base import ClippedSection, PolicyGradientSection
from shared.own_rules import CREDITS
from shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """Options of token rewards.

    `kl_coef` scales a KL penalty in the reward: k1 from the sampling policy (as the trainer computes it, if known) to
    the reference. `own_credit` is the user's own rule for turns. `penalty` of the number of an episode's sampled tokens
    is added to its reward. `mask_truncated` excludes truncated episodes from the loss and from the statistics of their
    group and step.
    """

    credit: Credit = "episode"
    own_credit: Callable[[Trajectory, TokenRewards], TokenRewards] | None = None
    normalization: Normalization | None = None
    penalty: Callable[[int], float] | None = None
    kl_coef: float = 0.0
    mask_truncated: bool = False

    @classmethod
    def of(cls, section: PolicyGradientSection) -> Self:
        """Read the options that all algorithms share from a section of the configuration."""
        how = section.reward_normalization
        return cls(
            credit="turn" if section.credits_turns else "episode",
            own_credit=None if section.credit in CREDITS else added_terms().credit(section.credit),
            normalization=None if how.method == "identity" else Normalization(how.grouping, how.method),
            kl_coef=section.beta if section.kl_in == "reward" else 0.0,
            mask_truncated=section.mask_truncated,
        )


class PolicyGradient[S: PolicyGradientSection](ABC):
    """The actor's loss; a subclass computes its surrogate and its advantages.

    Args:
        section: the algorithm's section of the configuration.
        n_updates: optimizer updates on the data of one step.
        max_response_length: most tokens of a turn.
    """

    def __init__(self, section: S, n_updates: int, max_response_length: int) -> None:
        self.section = section
        self.actor, self.rewards = ActorOptions.of(section), self.reward_options(max_response_length)
        self._needs = Needs(
            reference=bool(self.actor.beta or self.rewards.kl_coef),
            old=n_updates > 1 and self.actor.correction.needs_old,
            entropy=bool(self.actor.entropy_coef),
        )

    def reward_options(self, max_response_length: int) -> RewardOptions:
        return RewardOptions.of(self.section)

    @property
    def needs(self) -> Needs:
        return self._needs

    def counts(self, trajectory: Trajectory) -> bool:
        return not (self.rewards.mask_truncated and trajectory.status == "truncated")

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """See `Algorithm.advantages`."""
        return self.zero_outside_loss(groups, self.compute_advantages)

    @abstractmethod
    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """Compute float64 [N] for each episode. All episodes are in the loss, and each group has one or more.

        In a game, the episodes of each seat form a group of their own.
        """

    def zero_outside_loss(
        self, groups: Sequence[EpisodeGroup], compute: Callable[[Sequence[EpisodeGroup]], list[list[np.ndarray]]]
    ) -> list[list[np.ndarray]]:
        """Compute float64 [N] for each episode from the episodes in the loss alone; 0 for the others.

        Episodes outside the loss are in no mean, deviation, baseline or pool: the trained ones are compared among
        themselves, and those of a game seat by seat.
        """

        def of_kept(groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
            kept = [[e for e in group if self.counts(e.trajectory)] for group in groups]
            made = (one for group in compute([group for group in kept if group]) for one in group)
            return [
                [next(made) if self.counts(e.trajectory) else np.zeros(e.trajectory.n_stored) for e in group]
                for group in groups
            ]

        if not any(episode.trajectory.seats for group in groups for episode in group):
            return of_kept(groups)
        return added_terms().for_each_seat(groups, of_kept)

    @abstractmethod
    def surrogate(self, tokens: Tokens) -> TokenLoss:
        """Compute the loss of each token before corrections, KL penalty and entropy bonus."""

    def loss(self, scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
        return actor_loss(scores, batch, self.actor, self.surrogate)

    def token_masks(self, scores: TokenScores, batch: Batch) -> TokenMasks:
        """See `Algorithm.token_masks`."""
        return token_masks(scores, batch, self.actor, self.surrogate)

    def within_groups(self, groups: Sequence[EpisodeGroup], estimate: Estimate) -> list[list[np.ndarray]]:
        """Compute advantages relative to the other episodes of the same task, as `compute_advantages` does.

        All sampled tokens of an episode, in all its sequences, have the episode's advantage; an episode counts once in
        the statistics of its group, with any number of sequences.

        With credit by turn, a turn has the reward of it and of all later turns of its sequence, compared with the same
        sum at the other episodes' turn of the same number (as in MT-GRPO, arXiv:2505.11821). Turns count from the
        beginning of the whole sequence; if several sequences of an episode have a turn of their own with that number,
        the episode is compared by the mean of their sums, and they share its advantage.
        """
        of_group = _of_episodes if self.rewards.credit == "episode" else _of_turns
        return [of_group(group, made, estimate) for group, made in zip(groups, self.token_rewards(groups), strict=True)]

    def token_rewards(self, groups: Sequence[EpisodeGroup]) -> list[list[TokenRewards]]:
        """Compute the rewards of each episode's tokens, with penalties and normalization."""
        made = [[self._token_rewards(episode) for episode in group] for group in groups]
        how = self.rewards.normalization
        if how is None:
            return made
        found = [np.array([one.total for one in group]) for group in made]
        trajectories = [[e.trajectory for e in group] for group in groups]
        wanted = token_rewards.normalized(found, trajectories, how)
        return [
            [one.with_total(total) for one, total in zip(group, totals, strict=True)]
            for group, totals in zip(made, wanted, strict=True)
        ]

    def _token_rewards(self, episode: EpisodeTokens) -> TokenRewards:
        options, trajectory = self.rewards, episode.trajectory
        added = 0.0 if options.penalty is None else options.penalty(trajectory.n_sampled)
        made = token_rewards.of_tokens(trajectory, options.credit, added)
        if options.kl_coef:
            assert episode.reference is not None
            of_policy = trajectory.stored("logprobs") if episode.old is None else episode.old
            above = of_policy.astype(np.float64) - episode.reference.astype(np.float64)
            at = sampled(episode)
            made.tokens[at] -= options.kl_coef * above[at]
        return made if options.own_credit is None else options.own_credit(trajectory, made)


def sampled(episode: EpisodeTokens) -> np.ndarray:
    """Return bool [N]: true for sampled tokens."""
    return episode.trajectory.stored("loss_mask").astype(bool)


def sampled_of(groups: Sequence[EpisodeGroup]) -> list[np.ndarray]:
    """Return `sampled` of each episode, group by group."""
    return [sampled(e) for group in groups for e in group]


class Clipped[S: ClippedSection](PolicyGradient[S]):
    """PPO's clipped surrogate."""

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        return Clip.of(self.section).of_tokens(tokens)


def _of_episodes(group: EpisodeGroup, made: Sequence[TokenRewards], estimate: Estimate) -> list[np.ndarray]:
    scale = group_relative(np.array([r.total for r in made]), estimate)
    return [a * sampled(e).astype(np.float64) for a, e in zip(scale, group, strict=True)]


def _of_turns(group: EpisodeGroup, made: Sequence[TokenRewards], estimate: Estimate) -> list[np.ndarray]:
    turns = [token_rewards.turn_of_tokens(e.trajectory) for e in group]
    rewards = [r.along_sequences() for r in made]
    ends = [np.cumsum(e.trajectory.own_lengths())[:-1] for e in group]
    advantages = [np.zeros(len(r)) for r in rewards]
    for k in range(1 + max(int(t.max()) for t in turns)):
        there = [i for i, t in enumerate(turns) if (t == k).any()]
        left = np.array([_left(rewards[i], turns[i], ends[i], k) for i in there])
        for i, advantage in zip(there, group_relative(left, estimate), strict=True):
            advantages[i][turns[i] == k] = advantage
    return advantages


def _left(rewards: np.ndarray, turns: np.ndarray, ends: np.ndarray, k: int) -> float:
    """Sum the rewards [N] from turn k on; the mean over the sequences that have a turn k of their own."""
    parts = zip(np.split(rewards, ends), np.split(turns, ends), strict=True)
    return float(np.mean([r[t >= k].sum() for r, t in parts if (t == k).any()]))
