"""Credit of turns: what each turn is compared by, or learned by a critic, from the rewards of all turns.

With `credit: turn` a turn is worth the rewards from it on. A function of the user's own gives it another number: a
discounted sum, or the differences of a potential.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from services.trainer.algorithms.terms.rewards import TokenRewards, turn_of_tokens
from shared.errors import RuleFailed
from shared.own_rules import OwnRule
from shared.rule_code import called, read
from shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class TurnInputs:
    """The K turns of one sequence that the policy sampled, in order.

    rewards: float64 [K], of each turn; the last one has also the part of the episode's reward that is no turn's.
    lengths: int64 [K], numbers of sampled tokens.
    turn: int64 [K], number of each turn in its whole sequence; the first own turn of a branch may be above 0.
    reward, truncated, success: of the whole episode.
    """

    env: str
    task: str
    rewards: np.ndarray
    lengths: np.ndarray
    turn: np.ndarray
    reward: float
    truncated: bool
    success: bool


type CreditFunction = Callable[[TurnInputs], np.ndarray]
"""From the turns of a sequence to the finite worth of each, float64 [K]."""


def credit_of(rule: OwnRule) -> CreditFunction:
    """Return the credit, which raises RuleFailed."""

    def credit(turns: TurnInputs) -> np.ndarray:
        made, n = called(rule, turns), len(turns.rewards)
        wanted = f"return a finite number for each of the {n} turns, [{n}]"
        try:
            found = np.asarray(made, np.float64)
        except (TypeError, ValueError) as error:
            raise RuleFailed(f"{rule} returned {type(made).__name__}: {error}", wanted) from error
        if found.shape != (n,):
            raise RuleFailed(f"{rule} returned {list(found.shape)} for {n} turns", wanted)
        if not np.isfinite(found).all():
            rewards = np.array2string(turns.rewards, threshold=8, precision=4)
            raise RuleFailed(f"{rule} returned a credit that is not finite for rewards {rewards}", wanted)
        return found

    return credit


def credit_named(value: str) -> Callable[[Trajectory, TokenRewards], TokenRewards]:
    """Return a function that credits the turns of an episode by the rule of a configuration's `credit`."""
    return partial(credited, credit=credit_of(read(value)))


def credited(trajectory: Trajectory, rewards: TokenRewards, credit: CreditFunction) -> TokenRewards:
    """Return rewards whose sum along a sequence, from a turn on, is the turn's credit."""
    along, numbers, made, first = rewards.along_sequences(), turn_of_tokens(trajectory), list[np.ndarray](), 0
    for n in trajectory.own_lengths():
        own, of_sequence = numbers[first : first + n], along[first : first + n]
        made.append(_of_sequence(own, credit(_inputs(trajectory, own, of_sequence))))
        first += n
    return replace(rewards, credited=np.concatenate(made))


def _inputs(trajectory: Trajectory, numbers: np.ndarray, rewards: np.ndarray) -> TurnInputs:
    """Sum up the rewards [N] of a sequence by the turns [N] of its tokens."""
    turn, place, lengths = np.unique(numbers[numbers >= 0], return_inverse=True, return_counts=True)
    return turn_inputs(trajectory, np.bincount(place, rewards[numbers >= 0], len(turn)), lengths, turn)


def turn_inputs(trajectory: Trajectory, rewards: np.ndarray, lengths: np.ndarray, turn: np.ndarray) -> TurnInputs:
    """Make the inputs of a sequence's turns [K]; the arrays cannot be written to from then on."""
    for array in (rewards, lengths, turn):
        array.setflags(write=False)
    return TurnInputs(
        env=trajectory.env,
        task=trajectory.task,
        rewards=rewards,
        lengths=lengths,
        turn=turn,
        reward=float(trajectory.reward),
        truncated=trajectory.status == "truncated",
        success=trajectory.success,
    )


def _of_sequence(numbers: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Place the difference of each turn's worth [K] from the next one's at the turn's last token: float64 [N]."""
    made = np.zeros(len(numbers))
    ends = (numbers >= 0) & (numbers != np.append(numbers[1:], -1))
    made[ends] = worth - np.append(worth[1:], 0.0)
    return made
