"""Which chunk a server pulls next, and of whom.

All servers share the trainer's uplink, so it is asked first for what no other server has: then those that pull the same
version soon have different chunks, and get the others from each other, at once in both directions (the rarest first, as
in BitTorrent: Cohen 2003, but that here one source has everything). Who does least for us is asked first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shared.clients.chunks import WeightSource
from shared.published.holding import Holding

_SPARED = 2
"""Transfers by which the trainer counts as busier than it is, where others have all that is missing."""


@dataclass(eq=False)
class Source:
    """Where chunks may be had; `avoided` is until when it is left out, by the monotonic clock, and `reason` why; until
    `rests` it had enough to do, `n_rests` times running. `holding` is what it has of the chunks that are wanted, in
    their order; None where that is not known.
    """

    url: str
    client: WeightSource
    is_trainer: bool
    n_transfers: int = 0
    n_failures: int = 0
    avoided: float = 0.0
    reason: str = ""
    is_busy: bool = False
    rests: float = 0.0
    n_rests: int = 0
    holding: Holding | None = None

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """It has one more to do inside."""
        self.n_transfers += 1
        try:
            yield
        finally:
            self.n_transfers -= 1

    def lacks(self, index: int | None) -> bool:
        """Whether it is known not to have that one."""
        return index is not None and self.holding is not None and not self.holding.has[index]


class ChunkPicker:
    """Over `missing`, bool[n]: which of the wanted chunks are neither here nor on their way. `are_told`: whether other
    servers tell what they have; where they don't, they are asked before the trainer.
    """

    def __init__(self, missing: np.ndarray, *, are_told: bool = True) -> None:
        self._missing, self._unknown = missing, 2 if are_told else 0

    @property
    def n_missing(self) -> int:
        return int(np.count_nonzero(self._missing))

    def put_back(self, index: int) -> None:
        self._missing[index] = True

    def clear(self) -> None:
        self._missing[:] = False

    def pick(self, sources: Sequence[Source], now: float) -> tuple[int, Source | None] | None:
        """The next chunk, which is not missing then, and who is asked for it; nobody if none of them may have one now,
        and None if no chunk is missing.
        """
        missing = self._missing
        if not missing.any():
            return None
        elsewhere = np.zeros_like(missing)
        for source in sources:
            if source.holding is not None and source.avoided <= now:
                elsewhere |= source.holding.has | source.holding.pending
        offers = [
            (*offer, random.random(), source)
            for source in sources
            if max(source.avoided, source.rests) <= now and (offer := self._offer(source, missing & ~elsewhere))
        ]
        if not offers:
            index, source = int(missing.argmax()), None
        else:
            *_, index, _, source = min(offers, key=lambda offer: offer[:4])
        missing[index] = False
        return index, source

    def _offer(self, source: Source, rare: np.ndarray) -> tuple[int, int, int] | None:
        """How much it has to do, a number that is higher for whom to spare, and a chunk; None if it has none."""
        n, missing = source.n_transfers + source.n_rests, self._missing  # who sent nothing when asked is asked later
        if source.is_trainer:
            return (n, 1, int(rare.argmax())) if rare.any() else (n + _SPARED, 1, int(missing.argmax()))
        if source.holding is None:
            return n, self._unknown, int(missing.argmax())
        offered = missing & source.holding.has
        return (n, 0, int(offered.argmax())) if offered.any() else None
