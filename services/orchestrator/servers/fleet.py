"""Keep the balancer's list of rollout servers up to date: discover them, probe their weights, remove those that left.

Servers are found in the registry and in a fixed list. Each is probed directly, so that a new version is known soon
after its commit and a dead server is noticed without a request; a server that failed must report ready before it gets
requests again. A registry that does not answer changes nothing.

Requests to a server that has answered no probe for `give_up_s` end as unreachable, and continue elsewhere: its machine
may have vanished without closing a connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.orchestrator.servers.balancer import Balancer, ServerLoad
from shared.clients.rollout import EngineLoad, RolloutClient
from shared.errors import ServiceUnreachable, Unavailable, VolleyError
from shared.process import telemetry
from shared.types import WeightVersion

_PROBE_TIMEOUT_S = 3.0
_FAST_S, _SLOW_S = 0.1, 1.0
GIVE_UP_S = 30.0
_log = telemetry.Log("fleet")


@dataclass(frozen=True, slots=True)
class DiscoveredServer:
    """A registered or configured server; `capacity` is how many requests it runs at once."""

    url: str
    capacity: int = 1


type Discover = Callable[[], Awaitable[Sequence[DiscoveredServer]]]
type Connect = Callable[[str], RolloutClient]
type Observe = Callable[[Sequence[EngineLoad]], None]


class Fleet:
    """Rollout servers of a run.

    Use it as an async context manager around `watch`; it closes all connections at the end.

    Args:
        observe: gets the loads of the servers that are in, about once a second; without it, they are not asked.
        give_up_s: longer than a server that stops takes to finish its requests, as it accepts no probes meanwhile.
    """

    def __init__(
        self,
        balancer: Balancer,
        discover: Discover,
        connect: Connect,
        observe: Observe | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._give_up_s, self._silent_since = give_up_s, dict[str, float]()
        self._balancer, self._discover, self._connect, self._observe = balancer, discover, connect, observe
        self._observed_at = -_SLOW_S
        self._clients: dict[str, RolloutClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as stack:
            for client in self._clients.values():
                stack.push_async_exit(client)

    async def watch(self) -> None:
        """Refresh until cancelled, more often while an episode waits for a server."""
        while True:
            await self.refresh()
            await asyncio.sleep(_FAST_S)
            await self._balancer.wait_for_demand(_SLOW_S)

    async def refresh(self) -> None:
        """Read the registry and probe every server once."""
        try:
            await self._sync(await self._discover())
        except Unavailable as error:
            _log.debug("registry unavailable", error=str(error))
        async with asyncio.TaskGroup() as group:
            for server in self._balancer.servers:
                if self._balancer.probe_due(server):
                    group.create_task(self._probe(server))
        await self._give_up()
        if self._observe is not None and time.monotonic() - self._observed_at >= _SLOW_S:
            self._observed_at = time.monotonic()
            async with asyncio.TaskGroup() as group:
                servers = [server for server in self._balancer.servers if not server.out and not server.leaving]
                for server in servers:
                    group.create_task(self._ask_load(server))
            self._observe([server.reported for server in servers if server.reported is not None])

    async def _ask_load(self, server: ServerLoad) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                server.reported = await server.engine.load()
        except (VolleyError, TimeoutError):
            server.reported = None  # the next probe of its weights tells if it is out

    async def _sync(self, found: Sequence[DiscoveredServer]) -> None:
        wanted = {server.url: server for server in found}
        for server in self._balancer.servers:
            server.leaving = server.url not in wanted
            if server.leaving and server.inflight == 0:
                await self._forget(server)
        known = {server.url for server in self._balancer.servers}
        for url in wanted.keys() - known:
            client = self._clients[url] = self._connect(url)
            await client.__aenter__()
            self._balancer.add(ServerLoad(url, client, capacity=max(1, wanted[url].capacity), out="not probed yet"))
            _log.info("rollout server found", url=url)

    async def _give_up(self) -> None:
        """End the requests of silent servers; those that are still registered are found again."""
        now = time.monotonic()
        for server in self._balancer.servers:
            silent_s = now - self._silent_since.get(server.url, now)
            if server.inflight and silent_s > self._give_up_s:
                _log.warning(
                    "requests to a silent server given up",
                    url=server.url,
                    n=server.inflight,
                    silent_s=round(silent_s, 1),
                )
                await self._forget(server)

    async def _forget(self, server: ServerLoad) -> None:
        self._balancer.remove(server.url)
        self._silent_since.pop(server.url, None)
        await self._clients.pop(server.url).__aexit__(None, None, None)
        _log.info("rollout server left", url=server.url)

    async def _probe(self, server: ServerLoad) -> None:
        was_out = bool(server.out)
        try:
            server.refused = None
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                found = await server.engine.weights()
                server.refused, current = found.refused, found.current
                if was_out:
                    await server.engine.ready()
            version = WeightVersion.parse(current) if current else None
        except (VolleyError, TimeoutError) as error:
            if isinstance(error, ServiceUnreachable | TimeoutError):
                self._silent_since.setdefault(server.url, time.monotonic())
            else:
                self._silent_since.pop(server.url, None)
            if not was_out:
                _log.warning("rollout server removed", url=server.url, error=str(error) or type(error).__name__)
            waits_on = error.waits_on if isinstance(error, VolleyError) else None
            self._balancer.fail(server, str(error) or "did not answer in time", waits_on)
            return
        self._silent_since.pop(server.url, None)
        if was_out:
            _log.info("rollout server back", url=server.url, version=str(version))
        self._balancer.observe(server, version)
