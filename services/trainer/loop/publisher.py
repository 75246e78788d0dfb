"""Tells every rollout server of new weights, all at once and beside training, and records how long that took. Best
effort: servers also watch the checkpoint folder themselves.

Invariants: only durable checkpoints are published; a failure is logged and counted, and never stops training; a newer
version that waits makes an older one superfluous; a server that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from services.trainer.settlement.ledger import FencedLog
from services.trainer.status import TrainerStatus
from shared.errors import VolleyError
from shared.process import telemetry
from shared.run.weights import MANIFEST
from shared.types import WeightVersion

_log = telemetry.Log("publish")
_UPDATES = telemetry.Counter(
    "volley_trainer_weight_updates", "Weight updates sent to rollout servers", ["outcome"], registry=telemetry.REGISTRY
)


class RolloutServer(Protocol):
    """The part of the rollout server's client that is used here."""

    async def update_weights(self, manifest: Path, mode: str) -> dict[str, Any]: ...


type Connect = Callable[[str], AbstractAsyncContextManager[RolloutServer]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one server answered. `seconds` is the whole call; `timings` are the server's own figures; `error` is None on
    success.
    """

    url: str
    seconds: float
    timings: Mapping[str, Any]
    error: str | None


class Publisher:
    """Args: servers: their present addresses; connect: opens a client; mode: what happens to running requests."""

    def __init__(self, servers: Callable[[], Awaitable[Sequence[str]]], connect: Connect, mode: str) -> None:
        self._servers, self._connect, self._mode = servers, connect, mode
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._newest = WeightVersion(0, 0)

    async def publish(self, folder: Path) -> Sequence[Delivery]:
        """Sends the checkpoint in `folder` to all servers, but to those for which a newer one came before its turn."""
        version = WeightVersion.parse(folder.name)
        self._newest = max(self._newest, version)
        try:
            urls = await self._servers()
        except VolleyError as error:
            _log.warning("no list of rollout servers", version=folder.name, reason=str(error))
            return []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._in_turn(url, folder, version)) for url in urls]
        return [delivery for task in tasks if (delivery := task.result()) is not None]

    async def _in_turn(self, url: str, folder: Path, version: WeightVersion) -> Delivery | None:
        async with self._turns[url]:
            return None if version < self._newest else await self._deliver(url, folder)

    async def _deliver(self, url: str, folder: Path) -> Delivery:
        started, answer, reason = time.perf_counter(), {}, None
        try:
            async with self._connect(url) as server:
                answer = await server.update_weights(folder / MANIFEST, self._mode)
        except VolleyError as error:
            reason = str(error)
        seconds = time.perf_counter() - started
        _UPDATES.labels("failed" if reason else "ok").inc()
        log = _log.warning if reason else _log.info
        log(
            "weights published" if reason is None else "weights not published",
            version=folder.name,
            url=url,
            seconds=round(seconds, 4),
            reason=reason,
        )
        return Delivery(url, seconds, (answer or {}).get("timings") or {}, reason)


class HandoverPublisher:
    """Publishes the checkpoints of one incarnation and puts each hand-over on record.

    Args: publish: see `Publisher.publish`; log: handovers.jsonl; group: where publishing goes on beside training.
    """

    def __init__(
        self,
        publish: Callable[[Path], Awaitable[Sequence[Delivery]]],
        log: FencedLog,
        status: TrainerStatus,
        group: asyncio.TaskGroup,
    ) -> None:
        self._publish, self._log, self._status, self._group = publish, log, status, group

    def start(self, folder: Path, timings: Mapping[str, float]) -> None:
        """Begins to send the durable checkpoint in `folder`; `timings` are the seconds of the hand-over until now. The
        group fails with Fenced if another trainer has begun.
        """
        self._group.create_task(self._hand_over(folder, timings))

    async def _hand_over(self, folder: Path, timings: Mapping[str, float]) -> None:
        started = time.perf_counter()
        deliveries = await self._publish(folder)
        seconds = time.perf_counter() - started
        self._status.timed("publish", seconds)
        version = {"step": WeightVersion.parse(folder.name).step, "version": folder.name}
        servers = [asdict(delivery) for delivery in deliveries]
        handover = {**version, **timings, "publish_s": seconds, "servers": servers}
        self._status.last_handover = handover
        await self._log.append(handover)
