"""Inputs of the user's own advantages and filters: a group in numpy, whose arrays cannot be written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.algorithms.terms.rewards import TokenRewards, turn_of_tokens
from shared.types import Trajectory, WeightVersion


@dataclass(frozen=True, slots=True)
class EpisodeInputs:
    """An episode of N tokens: those of all its sequences, one after the other, each once.

    ids: int32 [N], token ids.
    sampled: bool [N], true for tokens that the policy sampled; values of the others are ignored.
    sequence: int64 [N], the number of the token's sequence; a branch has a number above 0.
    turn: int64 [N], the number of the turn that sampled the token; -1 at other tokens.
    step: int64 [N], the step of the weights that sampled the token; -1 at other tokens.
    rewards: float64 [N], rewards of tokens, which add up to the episode's; by turn with `credit: turn`.
    logprobs: float32 [N], log-probabilities at the policy that sampled.
    reference: float32 [N], those of the policy at step 0, or None without `beta`.
    """

    ids: np.ndarray
    sampled: np.ndarray
    sequence: np.ndarray
    turn: np.ndarray
    step: np.ndarray
    rewards: np.ndarray
    logprobs: np.ndarray
    reference: np.ndarray | None


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The G episodes of one task that are in the loss.

    rewards: float64 [G], with normalization and penalties if the configuration has them.
    lengths: int64 [G], numbers of sampled tokens.
    truncated, success: bool [G].
    components: float64 [G] of each reward component; NaN for an episode without it.
    seat: of a game, the seat whose episodes these are; else empty.
    """

    env: str
    task: str
    rewards: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    components: Mapping[str, np.ndarray]
    episodes: tuple[EpisodeInputs, ...]
    seat: str = ""


def group_inputs(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[TokenRewards],
    references: Sequence[np.ndarray | None] | None = None,
) -> GroupInputs:
    """Make the inputs of a group of one or more episodes.

    Args: rewards, references: of each episode; the references are float32 [N], and missing by default.
    """
    given = zip(trajectories, rewards, references or [None] * len(trajectories), strict=True)
    names = sorted({name for one in trajectories for name in one.reward_components})
    return GroupInputs(
        env=trajectories[0].env,
        task=trajectories[0].task,
        rewards=_fixed(np.array([one.total for one in rewards])),
        lengths=_fixed(np.array([one.n_sampled for one in trajectories])),
        truncated=_fixed(np.array([one.status == "truncated" for one in trajectories])),
        success=_fixed(np.array([one.success for one in trajectories])),
        components={k: _fixed(np.array([t.reward_components.get(k, np.nan) for t in trajectories])) for k in names},
        episodes=tuple(_episode(*one) for one in given),
        seat=next(iter(trajectories[0].seats), ""),
    )


def _episode(trajectory: Trajectory, rewards: TokenRewards, reference: np.ndarray | None) -> EpisodeInputs:
    lengths = trajectory.own_lengths()
    return EpisodeInputs(
        ids=_fixed(trajectory.stored("token_ids").copy()),
        sampled=_fixed(trajectory.stored("loss_mask").astype(bool)),
        sequence=_fixed(np.repeat(np.arange(len(lengths)), lengths)),
        turn=_fixed(turn_of_tokens(trajectory)),
        step=_fixed(_steps(trajectory)),
        rewards=_fixed(rewards.tokens.copy()),
        logprobs=_fixed(trajectory.stored("logprobs").copy()),
        reference=None if reference is None else _fixed(reference.copy()),
    )


def _steps(trajectory: Trajectory) -> np.ndarray:
    parts = list[np.ndarray]()
    for one, n in zip((trajectory, *trajectory.branches), trajectory.own_lengths(), strict=True):
        shared, steps = getattr(one, "shared", 0), np.full(n, -1)
        for span in one.versions:
            steps[span.start - shared : span.end - shared] = WeightVersion.parse(span.version).step
        parts.append(steps)
    return np.concatenate(parts)


def _fixed(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x
