"""Choose the next chunk that a server pulls, and its source.

All servers share the trainer's uplink, so the trainer is asked first for chunks that no other server has. Servers that
pull the same version then soon have different chunks and exchange them in both directions (rarest first, as in
BitTorrent: Cohen 2003, except that one source has everything). The source with the fewest transfers is asked first.
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
"""Transfers added to the trainer's load if other servers have all missing chunks."""


@dataclass(eq=False)
class Source:
    """Server that may have chunks.

    It is avoided until the monotonic time `avoided`, for `reason`; it was busy until `rests`, `n_rests` times in a row.
    `holding` says which of the wanted chunks it has, in their order; None if unknown.
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
        """Count one more transfer while the block runs."""
        self.n_transfers += 1
        try:
            yield
        finally:
            self.n_transfers -= 1

    def lacks(self, index: int | None) -> bool:
        """Return whether it is known to lack the chunk."""
        return index is not None and self.holding is not None and not self.holding.has[index]


class ChunkPicker:
    """Args:
    missing: bool[n], the wanted chunks that are neither here nor being pulled.
    have_reports: other servers report their chunks; if not, they are asked before the trainer.
    """

    def __init__(self, missing: np.ndarray, *, have_reports: bool = True) -> None:
        self._missing, self._unknown = missing, 2 if have_reports else 0

    @property
    def n_missing(self) -> int:
        return int(np.count_nonzero(self._missing))

    def put_back(self, index: int) -> None:
        self._missing[index] = True

    def clear(self) -> None:
        self._missing[:] = False

    def pick(self, sources: Sequence[Source], now: float) -> tuple[int, Source | None] | None:
        """Return the next chunk, no longer counted as missing, and its source.

        The source is None if no source can be asked now. Returns None if no chunk is missing.
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
        """Return a source's load, its rank (higher is asked later) and a chunk; None if it has no missing chunk."""
        n, missing = source.n_transfers + source.n_rests, self._missing  # a source that sent nothing is asked later
        if source.is_trainer:
            return (n, 1, int(rare.argmax())) if rare.any() else (n + _SPARED, 1, int(missing.argmax()))
        if source.holding is None:
            return n, self._unknown, int(missing.argmax())
        offered = missing & source.holding.has
        return (n, 0, int(offered.argmax())) if offered.any() else None
