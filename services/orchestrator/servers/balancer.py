"""Choose a rollout server for each turn: fresh enough weights, fewest requests in flight, sticky per episode.

Rules
- A server is routable if it is up and its weights are fresh: at most `max_staleness` steps behind the queue's
  version, and not undone (a trainer that went back to an older step has a higher epoch, and wins).
- Waiting requests look again whenever the queue's version changes, also when it falls: their bound may have been
  lowered.
- An episode stays on its server for the prefix cache, unless that server is overloaded.
- A failure takes a server out until a probe, not a request, succeeds. The first probe comes at once (a connection may
  break by chance), later ones after a cool-down that grows until a request succeeds again.
- Only a routable server or cancellation ends the wait for one: an outage costs time, nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shared.clients.rollout import EngineLoad, Generation, RefusedWeights, ServerWeights
from shared.errors import Party
from shared.run.lineage import in_lineage
from shared.teacher_view import TeacherLogprobs
from shared.types import Lineage, WeightVersion

_OVERLOAD_FACTOR, _OVERLOAD_SLACK = 1.5, 4
_COOL_DOWN_S, _COOL_DOWN_CAP_S = 0.5, 8.0


class GenerateClient(Protocol):
    """`RolloutClient` methods that the balancer uses."""

    async def generate(
        self,
        input_ids: np.ndarray,
        sampling: Mapping[str, Any],
        rid: str,
        *,
        timeout_s: float | None = None,
        routed_from: int | None = None,
    ) -> Generation: ...

    async def score(self, ids: np.ndarray, start: int, *, timeout_s: float | None = None) -> TeacherLogprobs: ...

    async def abort(self, rid: str) -> None: ...

    async def weights(self) -> ServerWeights: ...

    async def load(self) -> EngineLoad: ...

    async def ready(self) -> None: ...

    async def hold(self, holder: str, version: str, seconds: float) -> None: ...


@dataclass(slots=True)
class VersionBounds:
    """Steps of the weights that may answer. None leaves the lower bound to the staleness rule, the upper one open.

    `strict` checks every token against the bounds and the lineage, and takes only held servers, if any version is held.
    """

    min_step: int | None = None
    max_step: int | None = None
    strict: bool = False

    def lower(self, step: int) -> None:
        """Lower the bound after the trainer went back to `step`.

        Newer weights do not exist, and may never exist unless this request is served.
        """
        if self.min_step is not None:
            self.min_step = min(self.min_step, step)


@dataclass(slots=True)
class ServerLoad:
    """A rollout server as the orchestrator sees it.

    `inflight` counts our requests; a `leaving` server gets no new ones. `out` is why it gets no requests until a probe
    succeeds (empty if it does); `failures` counts failures since the last success; `waits_on` is the party that a
    server that is out names; `probe_at` is the time of its next probe. `reported` is the load that the
    server itself reported last. `refused` are weights that it does not load any more, by its last probe.
    """

    url: str
    engine: GenerateClient
    version: WeightVersion | None = None
    capacity: int = 1
    inflight: int = 0
    out: str = ""
    waits_on: Party | None = None
    failures: int = 0
    probe_at: float = 0.0
    leaving: bool = False
    reported: EngineLoad | None = None
    refused: RefusedWeights | None = None

    @property
    def load(self) -> float:
        return self.inflight / self.capacity


class Balancer:
    """Balancer of one run. Args: max_staleness: allowed staleness in steps; clock: monotonic seconds."""

    def __init__(self, max_staleness: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_staleness, self._clock = max_staleness, clock
        self._target = WeightVersion(-1, 0)  # unknown: no version is undone
        self._lineage: Lineage = ()
        self._servers: dict[str, ServerLoad] = {}
        self._changed = asyncio.Event()
        self._waiting: dict[object, VersionBounds] = {}
        self._demand = asyncio.Event()
        self._holding: frozenset[str] | None = None

    @property
    def servers(self) -> Sequence[ServerLoad]:
        return tuple(self._servers.values())

    def set_target(self, version: WeightVersion, lineage: Lineage) -> None:
        """Set the queue's version (the trainer's newest durable step) and its lineage."""
        if self._target != version:
            self._target, self._lineage = version, lineage
            self._notify()

    def set_holding(self, urls: frozenset[str] | None) -> None:
        """Set the servers that keep the version being measured; None if they need not keep it."""
        if urls != self._holding:
            self._holding = urls
            self._notify()

    def is_undone(self, version: WeightVersion) -> bool:
        """True if a later trainer went back to before these weights."""
        return version.epoch <= self._target.epoch and not in_lineage(version, self._lineage)

    def add(self, server: ServerLoad) -> None:
        self._servers[server.url] = server
        self._notify()

    def remove(self, url: str) -> None:
        self._servers.pop(url, None)

    def observe(self, server: ServerLoad, version: WeightVersion | None) -> None:
        """Record a successful probe, with the server's weights."""
        changed = server.version != version or bool(server.out)
        server.version, server.out, server.waits_on = version, "", None
        if changed:
            self._notify()

    def succeeded(self, server: ServerLoad, version: str | None) -> None:
        """Record an answered request, by weights of this version; they may be newer than the last probe's."""
        server.failures = 0
        seen = WeightVersion.parse(version) if version else None
        if seen is not None and (server.version is None or seen > server.version):
            server.version = seen
            self._notify()

    def fail(self, server: ServerLoad, reason: str, waits_on: Party | None = None) -> None:
        """Take the server out; while it is out, only a failed probe counts as a further failure."""
        if server.out and self._clock() < server.probe_at:
            return
        cool_down = min(_COOL_DOWN_CAP_S, _COOL_DOWN_S * 2 ** (server.failures - 1)) if server.failures else 0.0
        server.failures += 1
        server.out, server.waits_on, server.probe_at = reason, waits_on, self._clock() + cool_down

    def probe_due(self, server: ServerLoad) -> bool:
        """True if the server is due for a probe of its weights and, if it is out, of its readiness."""
        return self._clock() >= server.probe_at

    @asynccontextmanager
    async def server(self, need: VersionBounds, preferred: str | None = None) -> AsyncIterator[ServerLoad]:
        """Wait for a server for one request, and count the request as in flight within the context.

        Args:
            preferred: url of the server that has the episode's prefix.
        """
        chosen = await self._wait(need, preferred)
        chosen.inflight += 1
        try:
            yield chosen
        finally:
            chosen.inflight -= 1

    async def wait_routable(self, need: VersionBounds) -> None:
        """Wait until a request would find a server at once."""
        await self._wait(need, None)

    def why_unroutable(self, need: VersionBounds | None = None) -> str | None:
        """Return why no request can be routed; None if one can."""
        if any(self._obstacle(server, need or VersionBounds()) is None for server in self._servers.values()):
            return None
        if not self._servers:
            return "no rollout server is known"
        return "; ".join(f"{s.url}: {self._obstacle(s, need or VersionBounds())}" for s in self._servers.values())

    def refusals(self) -> dict[str, str]:
        """Return why servers refuse the newest weights for good, by address."""
        return {
            s.url: f"refuses {s.refused.version} for good: {s.refused.reason}"
            for s in self._servers.values()
            if s.refused is not None and s.refused.version >= self._target
        }

    def why_refused(self) -> str | None:
        """Return why waiting requests need newer weights than any server will load: all refuse the newest for good.

        A server that is temporarily out or leaving counts by its weights.
        """
        refusals, needs = self.refusals(), [*self._waiting.values()] or [VersionBounds()]
        if not self._servers or len(refusals) < len(self._servers):
            return None
        if any(self._unfit(s.version, need) is None for s in self._servers.values() for need in needs):
            return None
        return "; ".join(f"{url} {why}" for url, why in refusals.items())

    def pick(self, need: VersionBounds, preferred: str | None = None) -> ServerLoad | None:
        """Return the routable server to use now, or None."""
        routable = [s for s in self._servers.values() if self._obstacle(s, need) is None]
        if not routable:
            return None
        sticky = next((s for s in routable if s.url == preferred), None)
        if sticky is not None and not _overloaded(sticky, routable):
            return sticky
        return min(routable, key=lambda s: s.load)

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for a server."""
        return len(self._waiting)

    def describe(self) -> list[dict[str, Any]]:
        """Describe every server.

        `obstacle` is why it cannot serve the waiting requests (if none wait, any request); `lacks_step` is the step it
        lacks.
        """
        need = next(iter(self._waiting.values()), VersionBounds())
        return [
            {
                "url": s.url,
                "version": str(s.version) if s.version else None,
                "inflight": s.inflight,
                "out": s.out or None,
                "waits_on": s.waits_on,
                "obstacle": self._obstacle(s, need),
                "lacks_step": floor
                if s.version and not s.out and s.version.step < (floor := self._floor(need))
                else None,
            }
            for s in self._servers.values()
        ]

    def _floor(self, need: VersionBounds) -> int:
        return need.min_step if need.min_step is not None else self._target.step - self._max_staleness

    def _obstacle(self, server: ServerLoad, need: VersionBounds) -> str | None:
        if server.leaving:
            return "is leaving"
        if server.out:
            return f"failed ({server.out})"
        if (unfit := self._unfit(server.version, need)) is not None:
            return unfit
        if need.strict and self._holding is not None and server.url not in self._holding:
            return f"may not keep {server.version}"
        return None

    def _unfit(self, version: WeightVersion | None, need: VersionBounds) -> str | None:
        """Return why weights of this version may not answer; None if they may."""
        if version is None:
            return "has no weight version yet"
        if self.is_undone(version):
            return f"has {version}, which was undone: the trainer is at {self._target}"
        if version.step < (floor := self._floor(need)):
            return f"has {version}, step {floor} is needed"
        if need.max_step is not None and version.step > need.max_step:
            return f"has {version}, not newer than step {need.max_step} is needed"
        return None

    async def _wait(self, need: VersionBounds, preferred: str | None) -> ServerLoad:
        key = object()
        while (chosen := self.pick(need, preferred)) is None:
            self._waiting[key] = need
            self._demand.set()
            try:
                await self._changed.wait()
            finally:
                del self._waiting[key]
        return chosen

    async def wait_for_demand(self, timeout_s: float) -> None:
        """Wait until an episode waits for a server, at most `timeout_s`."""
        if not self._waiting:
            self._demand.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._demand.wait(), timeout_s)

    def _notify(self) -> None:
        """Wake all waiting requests. The event is replaced, because waiters would spin on a set one."""
        self._changed.set()
        self._changed = asyncio.Event()


def _overloaded(server: ServerLoad, routable: Sequence[ServerLoad]) -> bool:
    """True for more than 1.5 times the server's fair share of our requests, plus a few."""
    fair = sum(s.inflight for s in routable) * server.capacity / sum(s.capacity for s in routable)
    return server.inflight > _OVERLOAD_FACTOR * fair + _OVERLOAD_SLACK
