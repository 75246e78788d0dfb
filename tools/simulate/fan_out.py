"""How the pieces of a version spread from the trainer to all servers, each of which passes on what it has.

A discrete-event simulation. A source serves so many transfers at once, a server pulls so many at once, and every
transfer has an equal share of both: slower than what a busy link would give where slots are empty. A server takes the
piece that the fewest have, from whoever has a free slot, as its fellows do when a source answers that it is busy.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

TRAINER = 0
_TRIES = 32  # how many of the others are looked at for each slot that falls free


@dataclass(frozen=True, slots=True)
class Links:
    """Of every source and every server: bytes a second, transfers at once; and seconds before each transfer."""

    up: float
    down: float
    served_at_once: int = 1
    pulled_at_once: int = 1
    latency: float = 0.0

    def transfer_s(self, n_bytes: float) -> float:
        return self.latency + n_bytes / min(self.up / self.served_at_once, self.down / self.pulled_at_once)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds at which each server has its pieces, ascending, and how many pieces each source has sent (the trainer
    first).
    """

    arrivals: list[list[float]]
    sent: list[int]

    @property
    def last_s(self) -> float:
        return max(times[-1] for times in self.arrivals)


def spread(n_servers: int, n_pieces: int, piece_bytes: float, links: Links) -> Spread:
    """From the moment when the trainer has all pieces."""
    swarm = _Swarm(n_servers, n_pieces, links.transfer_s(piece_bytes), links)
    swarm.fill_all()
    while swarm.running:
        swarm.next()
    return Spread(swarm.arrivals, swarm.sent)


class _Swarm:
    """Who has what, as bits; the trainer is node 0. `running` holds (end, number, source, server, piece).

    `idle` are sources with a free slot, `hungry` servers with one that lack pieces: dicts, for their order.
    """

    def __init__(self, n_servers: int, n_pieces: int, transfer_s: float, links: Links) -> None:
        self._all, self._transfer_s, self._now = (1 << n_pieces) - 1, transfer_s, 0.0
        self._has = [self._all] + [0] * n_servers
        self._wants = [0] + [self._all] * n_servers  # neither here nor on its way
        self._out = [links.served_at_once] * (n_servers + 1)
        self._in = [0] + [links.pulled_at_once] * n_servers
        self._copies = [1] * n_pieces
        self._idle = {TRAINER: None}
        self._hungry = dict.fromkeys(range(1, n_servers + 1))
        self._numbers = itertools.count()
        self.running: list[tuple[float, int, int, int, int]] = []
        self.arrivals: list[list[float]] = [[] for _ in range(n_servers)]
        self.sent = [0] * (n_servers + 1)

    def next(self) -> None:
        """Ends the next transfer, and begins those that it makes possible."""
        self._now, _, source, server, piece = heapq.heappop(self.running)
        self._has[server] |= 1 << piece
        self.arrivals[server - 1].append(self._now)
        self._out[source] += 1
        self._in[server] += 1
        self._idle[source] = None
        if self._out[server]:
            self._idle[server] = None
        if self._wants[server]:
            self._hungry[server] = None
        for one in (source, server):
            self._serve(one)
        self._pull(server)
        if not self.running:
            self.fill_all()

    def fill_all(self) -> None:
        for source in list(self._idle):
            self._serve(source, len(self._hungry))

    def _serve(self, source: int, tries: int = _TRIES) -> None:
        for server in list(itertools.islice(self._hungry, tries)):
            while self._out[source] and self._in[server] and self._begin(source, server):
                pass
            if not self._out[source]:
                return

    def _pull(self, server: int) -> None:
        for source in list(itertools.islice(self._idle, _TRIES)):
            if not self._in[server]:
                return
            if self._out[source]:
                self._begin(source, server)

    def _begin(self, source: int, server: int) -> bool:
        """Begins a transfer, if there is a piece for it."""
        offered = self._has[source] & self._wants[server]
        if not offered or source == server:
            return False
        piece = self._rarest(offered)
        self._copies[piece] += 1
        self._wants[server] &= ~(1 << piece)
        self._out[source] -= 1
        self._in[server] -= 1
        self.sent[source] += 1
        if not self._out[source]:
            self._idle.pop(source, None)
        if not (self._in[server] and self._wants[server]):
            self._hungry.pop(server, None)
        heapq.heappush(self.running, (self._now + self._transfer_s, next(self._numbers), source, server, piece))
        return True

    def _rarest(self, pieces: int) -> int:
        """Of those with copies here or on their way."""
        best, fewest = -1, 1 << 62
        while pieces:
            low = pieces & -pieces
            piece = low.bit_length() - 1
            if self._copies[piece] < fewest:
                best, fewest = piece, self._copies[piece]
            pieces ^= low
        return best
