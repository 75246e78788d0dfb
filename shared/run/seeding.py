"""All randomness of a run, as pure functions of its seed: task order, and seeds of sampling and environments.

Invariants
- A pass over a split visits every task exactly once, in its own order, which depends only on the ordinal of a group
  among those of its environment (see shared.run.mixture) and the size of the split.
- Seeds do not depend on the attempt: a retried sample repeats itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TicketTask:
    """Task of a ticket: an index in the training split of an environment."""

    env: str
    index: int


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """Sampling without replacement: map a group's ordinal to an index in a split of `n_tasks` tasks.

    The ordinal counts the groups of an environment from 1; with one environment it is the ticket.
    """

    seed: int
    n_tasks: int

    def index(self, ordinal: int) -> int:
        """Return the index, 0 <= index < n_tasks; a bijection over the ordinals of each pass. O(1) in memory."""
        turn, position = divmod(ordinal - 1, self.n_tasks)
        half_bits = max(1, ((self.n_tasks - 1).bit_length() + 1) // 2)
        while True:
            position = self._feistel(position, turn, half_bits)
            if position < self.n_tasks:
                return position

    def _feistel(self, value: int, turn: int, half_bits: int) -> int:
        """Keyed permutation of [0, 4**half_bits); repeated until it is below n_tasks, it permutes [0, n_tasks)."""
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_hash(self.seed, "order", turn, number, right) & mask)
        return (left << half_bits) | right


def sampling_seed(run_seed: int, ticket: int, sample_index: int, position: int, draw: int = 0) -> int:
    """Return 31 bits for the engine.

    Args:
        position: where in the trajectory sampling starts.
        draw: number of the sample, if an agent's episode has several from there.
    """
    return _hash(run_seed, "sampling", ticket, sample_index, position, *([draw] if draw else [])) & 0x7FFF_FFFF


def env_seed(run_seed: int, ticket: int, sample_index: int) -> int:
    """Return 31 bits for an environment's randomness after its task is chosen."""
    return _hash(run_seed, "env", ticket, sample_index) & 0x7FFF_FFFF


def _hash(*parts: int | str) -> int:
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
