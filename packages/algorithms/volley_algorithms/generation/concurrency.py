"""Adapt the number of running episodes to what the rollout servers can handle.

Additive increase, multiplicative decrease. More requests than an engine decodes at once mean that too many episodes
run: their prefixes push each other out of the cache. Unused capacity while episodes wait for a slot means that servers
could do more. Episodes that wait for their environments need no engine, so no fixed number fits.

A request also waits in an engine's queue until its next step, so a queue alone means nothing; nor does a full pool of
keys and values, because it keeps prefixes that may be dropped. Both together do, if more requests wait than run, twice
in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.servers.slots import Slots
from shared.clients.rollout import EngineLoad

_EXCESS = 0.1
"""Share of the places that may be exceeded: waiting requests hide the time between two requests."""
_LESS, _MORE, _START = 0.85, 0.05, 2.0
"""Factor of a decrease; share of an increase; factor of an increase before the first decrease."""
_SCARCE_KV = 0.02


class AdaptiveConcurrency:
    """Sets the limit of the slots, between `least` and the limit that they begin with."""

    def __init__(self, slots: Slots, least: int) -> None:
        self._slots, self._most, self._least = slots, slots.limit, min(least, slots.limit)
        self._n_servers, self._is_probing, self._was_scarce = 0, True, False
        slots.limit = self._least

    def observe(self, loads: Sequence[EngineLoad]) -> None:
        """Adjust to the loads of all servers that may be used; without any, nothing changes."""
        if not loads:
            return
        limit, n_servers = self._slots.limit, len(loads)
        if self._n_servers and n_servers < self._n_servers:
            limit = limit * n_servers // self._n_servers  # their requests move to the others
        elif n_servers > self._n_servers:
            limit, self._is_probing = max(limit, sum(load.max_running for load in loads)), True
        self._n_servers = n_servers
        excess = sum(max(0, load.running + load.queued - load.max_running) for load in loads)
        is_scarce = any(load.free_kv < _SCARCE_KV and load.queued > load.running for load in loads)
        if excess > _EXCESS * sum(load.max_running for load in loads) or (is_scarce and self._was_scarce):
            limit, self._is_probing = min(limit, int(min(limit, self._slots.n_running) * _LESS) + 1), False
        elif self._slots.n_waiting and not excess and not is_scarce:
            limit += max(1, int(limit * (_START - 1 if self._is_probing else _MORE)))
        self._was_scarce = is_scarce
        self._slots.limit = max(self._least, min(self._most, limit))
