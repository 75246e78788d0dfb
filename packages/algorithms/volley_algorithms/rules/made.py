"""Made data for the checks of the user's own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms.rewards import of_tokens
from services.trainer.algorithms.terms.surrogate import Tokens
from services.trainer.models.attention import Packing
from shared.types import Branch, Trajectory, Turn, VersionSpan
from volley_algorithms.rules.credit import TurnInputs, turn_inputs
from volley_algorithms.rules.inputs import GroupInputs, group_inputs

_ROWS, _LENGTH, _WIDER = 3, 12, 20
_VERSION = "e000001-s{:06d}"
_ARRAYS = ("logprobs", "old", "behaviour", "advantages", "mask", "reference", "staleness")


def made_tokens(distance: float, *, reference: bool) -> Tokens:
    """Make three sequences of unequal length, with advantages of both signs, some of it 0.

    Args: distance: standard deviation of the present log-probabilities from the sampler's, in nats.
    """
    rng = np.random.default_rng(0)
    mask = np.zeros((_ROWS, _LENGTH), np.float32)
    mask[0, 2:], mask[1, 2:4], mask[1, 7:9], mask[2, 3:8] = 1, 1, 1, 1
    behaviour = -rng.exponential(1.0, mask.shape)
    made = {
        "logprobs": np.minimum(0.0, behaviour + distance * rng.standard_normal(mask.shape)),
        "old": np.minimum(0.0, behaviour + distance / 10 * rng.standard_normal(mask.shape)),
        "behaviour": behaviour,
        "advantages": np.array([[1.5], [-0.7], [-2.0]]) * rng.choice([0.0, 1.0, 1.0], mask.shape),
        "mask": mask,
        "reference": behaviour + 0.2 * rng.standard_normal(mask.shape) if reference else None,
        "staleness": rng.integers(0, 3, mask.shape),
    }
    return Tokens(**{k: None if x is None else jnp.asarray(x * mask, jnp.float32) for k, x in made.items()})


def single(tokens: Tokens, row: int) -> Tokens:
    """Return one row as a micro-batch with more padding."""
    return _each(tokens, lambda x: jnp.pad(x[row : row + 1], ((0, 0), (0, _WIDER - _LENGTH))))


def packed(tokens: Tokens) -> Tokens:
    """Return all sequences in one row."""
    positions = np.tile(np.arange(_LENGTH, dtype=np.int32), _ROWS)[None]
    sequences = np.repeat(np.arange(_ROWS, dtype=np.int32), _LENGTH)[None]
    packing = Packing(*map(jnp.asarray, (positions, (sequences + 1) * _LENGTH, sequences)))
    return _each(tokens, lambda x: x.reshape(1, -1))._replace(packing=packing)


def _each(tokens: Tokens, change: Callable[[jax.Array], jax.Array]) -> Tokens:
    found = {name: getattr(tokens, name) for name in _ARRAYS}
    return tokens._replace(**{name: None if x is None else change(x) for name, x in found.items()})


def made_groups(*, reference: bool) -> list[GroupInputs]:
    """Make groups of different, of equal and of huge rewards, and one of a single episode."""
    rng = np.random.default_rng(0)
    every = ([1.0, 0.0, 0.5, -2.0], [1.0, 1.0, 1.0], [0.0, 0.0], [1e6, -3e5, 0.0], [0.3])
    return [_group([_episode(rng, reward, i) for i, reward in enumerate(rewards)], reference) for rewards in every]


def _group(trajectories: list[Trajectory], reference: bool) -> GroupInputs:
    known = [t.stored("logprobs") * np.float32(1.1) if reference else None for t in trajectories]
    made = group_inputs(trajectories, [of_tokens(t, "turn") for t in trajectories], known)
    return replace(made, components=_AnyComponent(made.components, made.rewards))


def made_turns() -> list[TurnInputs]:
    """Make the turns of sequences of one, of two and of many turns, with rewards of any size and none."""
    made = list[TurnInputs]()
    for rewards in ([1.0], [0.0, 0.0], [0.5, -2.0, 1e6, 0.0, -3e5], [0.0] * 30 + [1.0]):
        trajectory, n = _episode(np.random.default_rng(0), sum(rewards), len(made)), len(rewards)
        made.append(turn_inputs(trajectory, np.array(rewards), np.arange(1, n + 1), np.arange(n)))
    return made


class _AnyComponent(dict[str, np.ndarray]):
    """Components of a reward: each name has one, since those of the run's environments are not known."""

    def __init__(self, known: Mapping[str, np.ndarray], rewards: np.ndarray) -> None:
        super().__init__(known)
        self._rewards = rewards

    def __missing__(self, name: str) -> np.ndarray:
        return self._rewards


def _episode(rng: np.random.Generator, reward: float, number: int) -> Trajectory:
    """Make an episode of two turns; every second one has a branch, and every third one was cut off."""
    n = 10 + number
    mask = np.zeros(n, np.uint8)
    mask[3:5], mask[7:] = 1, 1
    branch = Branch(
        parent=0,
        shared=6,
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([0, -0.5, -1.5], np.float32),
        versions=(VersionSpan(_VERSION.format(2), 7, 9),),
        turns=(Turn(7, 9, "assistant", 0.0),),
    )
    return Trajectory(
        ticket=1,
        sample_index=number,
        attempt=0,
        env="made",
        task="train/0",
        prompt_len=3,
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=mask,
        logprobs=(-rng.exponential(1.0, n) * mask).astype(np.float32),
        versions=(VersionSpan(_VERSION.format(1), 3, 5), VersionSpan(_VERSION.format(2), 7, n)),
        turns=(Turn(3, 5, "assistant", reward / 4), Turn(7, n, "assistant", 0.0)),
        reward=reward,
        success=reward > 0,
        status="truncated" if number % 3 == 2 else "completed",
        reward_components={"made": reward},
        branches=(branch,) if number % 2 else (),
    )
