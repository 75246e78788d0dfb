"""Number of running episodes that the rollout servers keep up with.

Additive increase, multiplicative decrease. Requests that wait in the engines' queues mean that more episodes run than
slots of the engines, or tokens of their key/value pools, allow: their prefixes push each other out of the cache. An
empty queue while episodes wait for a slot means that servers could do more. Episodes that wait for their environments
need no engine, so no fixed number fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.servers.slots import Slots
from shared.clients.rollout import EngineLoad

_QUEUED_SHARE = 0.1
"""Share of the running requests that may wait in the engines' queues: it hides the time between two requests."""
_LESS, _MORE, _START = 0.85, 0.05, 2.0
"""Factor of a decrease; share of an increase; factor of an increase before the first decrease."""
_SCARCE_KV = 0.02


class AdaptiveConcurrency:
    """Sets the limit of the slots, between `least` and the limit that they begin with."""

    def __init__(self, slots: Slots, least: int) -> None:
        self._slots, self._most, self._least = slots, slots.limit, min(least, slots.limit)
        self._n_servers, self._is_probing = 0, True
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
        running, queued = sum(load.running for load in loads), sum(load.queued for load in loads)
        scarce = any(load.queued and load.free_kv < _SCARCE_KV for load in loads)
        if queued > _QUEUED_SHARE * running + n_servers or scarce:
            limit, self._is_probing = min(limit, int(min(limit, self._slots.n_running) * _LESS) + 1), False
        elif self._slots.n_waiting and not queued:
            limit += max(1, int(limit * (_START - 1 if self._is_probing else _MORE)))
        self._slots.limit = max(self._least, min(self._most, limit))
