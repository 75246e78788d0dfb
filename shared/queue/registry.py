"""Registry of a run's servers: leases in Redis that expire by themselves.

A server's record `{run}:srv:{id}` lives for 10 s and is written every 3 s, so a server that died or hangs disappears
within 10 s, and one that stops disappears at once. `{run}:srv` is the index of ids. A record is the server's own
description; readers decide if they send it work (by version, by load).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from redis.asyncio import Redis

from shared.engines import DeclaredEngine
from shared.errors import QueueUnavailable
from shared.process import telemetry
from shared.queue.client import command, transaction
from shared.queue.scripts import Keys

TTL_S = 10.0
HEARTBEAT_S = 3.0
_NOT_YET_S = 0.1
"""Interval between checks of an unregistered server, in seconds: it should get work as soon as it may."""
_GOODBYE_S = 2.0
_log = telemetry.Log("registry")


@dataclass(frozen=True, slots=True)
class RegisteredServer:
    """A server that may be sent work.

    `version` is the weight version it serves ("e000001-s000042"), `capacity` how many requests it serves at once,
    `epoch` the trainer incarnation its weights come from. `engine` is None in records of older servers.
    """

    id: str
    url: str
    version: str
    capacity: Annotated[int, Field(ge=1)]
    epoch: int
    engine: DeclaredEngine | None = None


_RECORD = TypeAdapter(RegisteredServer)


class Registry:
    """Servers of one run. Methods raise `QueueUnavailable` if Redis does not answer."""

    def __init__(self, redis: Redis, run: str) -> None:
        self._redis = redis
        self._index = Keys(run).prefix + "srv"

    async def servers(self) -> list[RegisteredServer]:
        """Return all servers with a live lease, sorted by id."""
        await self._drop_damaged_index()
        ids = sorted(id.decode() for id in await command(self._redis, "SMEMBERS", self._index))
        records = await command(self._redis, "MGET", *map(self._key, ids)) if ids else []
        await self._shorten(ids)
        gone = [id for id, record in zip(ids, records, strict=True) if record is None]
        if gone:
            await command(self._redis, "SREM", self._index, *gone)
        return [server for record in records if record is not None and (server := _decode(record)) is not None]

    async def heartbeat(self, current: Callable[[], RegisteredServer | None]) -> None:
        """Keep a server registered until cancelled, then deregister it; a worker for the server's task group.

        `current` is called before each heartbeat; None means that the server must not get work now. While Redis is away
        the server keeps running, and registers again when Redis is back.
        """
        known: str | None = None
        try:
            while True:
                server = current()
                try:
                    if server is not None:
                        known = server.id
                        await self._register(server)
                    elif known is not None:
                        await self._deregister(known)
                        known = None
                except QueueUnavailable as error:
                    _log.warning("heartbeat failed", detail=str(error))
                await asyncio.sleep(_NOT_YET_S if known is None else HEARTBEAT_S)
        finally:
            if known is not None:
                with suppress(QueueUnavailable, TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await self._deregister(known)

    async def _drop_damaged_index(self) -> None:
        """Remove an index of another type; every server registers again within `HEARTBEAT_S`."""
        if await command(self._redis, "TYPE", self._index) not in (b"set", b"none"):
            await command(self._redis, "DEL", self._index)

    async def _shorten(self, ids: Sequence[str]) -> None:
        """Limit leases to `TTL_S`: Redis keeps them longer if its wall clock has gone back since they were written."""
        keys, most = [self._key(id) for id in ids], int(TTL_S * 1000)
        left = await transaction(self._redis, *(("PTTL", key) for key in keys)) if keys else []
        for key in (key for key, ms in zip(keys, left, strict=True) if ms > most):
            await command(self._redis, "PEXPIRE", key, most)

    async def _register(self, server: RegisteredServer) -> None:
        await self._drop_damaged_index()
        record = orjson.dumps(asdict(server))
        lease = ("SET", self._key(server.id), record, "PX", int(TTL_S * 1000))
        await transaction(self._redis, lease, ("SADD", self._index, server.id))

    async def _deregister(self, id: str) -> None:
        await transaction(self._redis, ("DEL", self._key(id)), ("SREM", self._index, id))

    def _key(self, id: str) -> str:
        return f"{self._index}:{id}"


def _decode(record: bytes) -> RegisteredServer | None:
    """Parse a record; None for an invalid one, which expires with its lease."""
    try:
        return _RECORD.validate_json(record, strict=True)
    except ValidationError as error:
        _log.warning(
            "a server's record cannot be read", record=record[:200].decode(errors="replace"), error=error.error_count()
        )
        return None
