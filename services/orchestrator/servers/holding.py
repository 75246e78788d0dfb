"""Hold rollout servers at the version being measured, while training goes on and the other servers get newer weights.

Each server grants a lease, which is renewed. A server is held until it refuses, or its lease ends without an answer. If
this process dies, the leases end, and the servers load newer weights.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from services.orchestrator.servers.balancer import Balancer, ServerLoad
from shared.errors import Conflict, VolleyError
from shared.process import telemetry
from shared.types import WeightVersion

_LEASE_S, _RENEW_S, _RETRY_S, _ANSWER_S = 20.0, 3.0, 0.1, 5.0
_log = telemetry.Log("holding")


class ServerHolds:
    """Leases of one run's evaluations. Args: share: share of the servers to hold, at least one."""

    def __init__(self, balancer: Balancer, share: float) -> None:
        self._balancer, self._share = balancer, share
        self._holder = uuid.uuid4().hex
        self._until: dict[str, float] = {}

    @property
    def any(self) -> bool:
        """True if a server is held."""
        return bool(self._until)

    @asynccontextmanager
    async def holding(self, version: WeightVersion, changed: Callable[[], None]) -> AsyncIterator[None]:
        """Hold servers within, if possible from the start; call `changed` after each change of `any`.

        A server that was lost is replaced by another one, as long as one serves the version.
        """
        self._balancer.set_holding(frozenset())
        try:
            await self._renew_and_report(version, changed)
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(self._keep(version, changed))
                yield
                keeping.cancel()
        finally:
            self._balancer.set_holding(None)
            await asyncio.shield(self._release(version))

    async def _keep(self, version: WeightVersion, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_RENEW_S if self.any else _RETRY_S)
            await self._renew_and_report(version, changed)

    async def _renew_and_report(self, version: WeightVersion, changed: Callable[[], None]) -> None:
        had = self.any
        await self._renew(version)
        self._balancer.set_holding(frozenset(self._until))
        if self.any != had:
            _log.info("holding servers", version=str(version), urls=[*self._until])
            changed()

    async def _renew(self, version: WeightVersion) -> None:
        """Renew the leases, and take more if there are too few."""
        servers = [server for server in self._balancer.servers if not server.leaving]
        wanted = max(1, math.ceil(self._share * len(servers)))
        urls = {server.url for server in servers}
        self._until = {url: end for url, end in self._until.items() if url in urls and end > time.monotonic()}
        async with asyncio.TaskGroup() as group:
            for server in servers:
                if server.url in self._until:
                    group.create_task(self._request_hold(server, version))
        for server in servers:
            if len(self._until) < wanted and server.url not in self._until and not server.out:
                await self._request_hold(server, version)

    async def _request_hold(self, server: ServerLoad, version: WeightVersion) -> None:
        until = time.monotonic() + _LEASE_S
        has = server.version
        same = has is not None and has.step == version.step and not self._balancer.is_undone(has)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await server.engine.hold(self._holder, str(has if same else version), _LEASE_S)
            self._until[server.url] = until
        except Conflict as error:
            self._until.pop(server.url, None)
            _log.debug("server refused to hold its weights", url=server.url, version=str(version), reason=str(error))
        except (VolleyError, TimeoutError) as error:
            _log.debug("hold not answered", url=server.url, version=str(version), reason=str(error))

    async def _release(self, version: WeightVersion) -> None:
        held, self._until = self._until, {}
        async with asyncio.TaskGroup() as group:
            for server in self._balancer.servers:
                if server.url in held:
                    group.create_task(self._release_server(server, version))

    async def _release_server(self, server: ServerLoad, version: WeightVersion) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await server.engine.hold(self._holder, str(version), 0.0)
        except (VolleyError, TimeoutError) as error:
            _log.debug("hold not released; it will expire", url=server.url, reason=str(error))
