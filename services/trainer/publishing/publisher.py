"""Notification of rollout servers about new weights, in the background, with timings.

Best effort: servers also ask for the newest version themselves, at the configured address. Servers that missed the
newest version, or restarted on an older one, are notified again: a step may wait for their tokens, and until then no
newer version is sent. A server also gets the addresses of some other servers, drawn at random, which pass chunks on.

Invariants: only committed steps are announced; a failure is logged and counted, and never stops training; a waiting
newer version cancels an older one; a server that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from services.trainer.publishing.publications import PublishedVersion
from services.trainer.status import TrainerStatus
from services.trainer.step_log import FencedLog
from shared.engines import DeclaredEngine
from shared.errors import VolleyError
from shared.process import telemetry, tracing
from shared.published.manifest import WeightOffer
from shared.types import WeightVersion

_log = telemetry.Log("publish")
_N_PEERS = 8
_AGAIN_S = 1.0
_LOOK_S = 5.0
"""Seconds between two checks of the served versions: longer than servers take to report theirs."""
_UPDATES = telemetry.Counter(
    "volley_trainer_weight_updates", "Weight updates sent to rollout servers", ["outcome"], registry=telemetry.REGISTRY
)


class RolloutServer(Protocol):
    """Methods of the rollout server's client that are used here."""

    async def update_weights(self, offer: WeightOffer, mode: str) -> dict[str, Any]: ...


type Connect = Callable[[str], AbstractAsyncContextManager[RolloutServer]]
type Served = Mapping[str, WeightVersion | None]
"""Version that each server reports, by address; None if unknown, or not a version of the run."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Response of one server.

    `seconds` is the whole call, `timings` are the server's; `error` is None on success. `engine` is the engine that
    took the version (see `DeclaredEngine.to_json`), if the server reports it.
    """

    url: str
    seconds: float
    timings: Mapping[str, Any]
    error: str | None
    engine: Mapping[str, Any] | None = None


class Publisher:
    """Notifies all rollout servers of a version.

    Args:
        own: address of the trainer, for the servers.
        servers: lists the present servers.
        announce: makes a version the newest that servers can request.
        connect: opens a client.
        mode: treatment of running requests.
    """

    def __init__(
        self,
        own: str,
        servers: Callable[[], Awaitable[Served]],
        announce: Callable[[PublishedVersion], None],
        connect: Connect,
        mode: str,
    ) -> None:
        self._own, self._servers, self._announce = own, servers, announce
        self._connect, self._mode = connect, mode
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._newest = WeightVersion(0, 0)
        self._taken = dict[str, WeightVersion]()

    async def publish(self, published: PublishedVersion) -> Sequence[Delivery]:
        """Announce the version and notify all servers, except those that a newer version reaches first.

        Does nothing if a newer version was announced before. If this version was, only servers that did not take it, or
        report an older one, are notified.
        """
        if published.version < self._newest:
            return []
        again = published.version == self._newest
        self._newest = published.version
        self._announce(published)
        try:
            served = await self._servers()
        except VolleyError as error:
            _log.warning("cannot list rollout servers", version=str(published.version), reason=str(error))
            return []
        urls = [*served]
        self._taken = {url: version for url, version in self._taken.items() if url in served}
        targets = [url for url in urls if not (again and self._has(url, served[url]))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._in_turn(url, published, urls)) for url in targets]
        return [delivery for task in tasks if (delivery := task.result()) is not None]

    async def sources(self) -> Sequence[str]:
        """Return addresses that may have chunks of the newest version; only the trainer's if no server is known."""
        try:
            return self._sources([*await self._servers()], "")
        except VolleyError:
            return (self._own,)

    def _sources(self, urls: Sequence[str], but: str) -> tuple[str, ...]:
        others = [url for url in urls if url != but]
        return self._own, *random.sample(others, min(_N_PEERS, len(others)))

    def _has(self, url: str, serves: WeightVersion | None) -> bool:
        return self._taken.get(url) == self._newest and (serves is None or serves >= self._newest)

    async def _in_turn(self, url: str, published: PublishedVersion, urls: Sequence[str]) -> Delivery | None:
        async with self._turns[url]:
            return None if published.version < self._newest else await self._deliver(url, published, urls)

    async def _deliver(self, url: str, published: PublishedVersion, urls: Sequence[str]) -> Delivery:
        started, answer, reason = time.perf_counter(), {}, None
        about = {"volley.version": str(published.version), "server.address": url}
        try:
            with tracing.span("hand over to a server", about, kind="client") as span:
                async with self._connect(url) as server:
                    offer = WeightOffer(str(published.version), published.manifest, self._sources(urls, url))
                    answer = await server.update_weights(offer, self._mode)
                timed = (answer or {}).get("timings") or {}
                span.set({f"volley.{name}": took for name, took in timed.items() if isinstance(took, int | float)})
            self._taken[url] = published.version
        except VolleyError as error:
            reason = str(error)
        seconds = time.perf_counter() - started
        _UPDATES.labels("failed" if reason else "ok").inc()
        log = _log.warning if reason else _log.info
        log(
            "weights published" if reason is None else "weights not published",
            version=str(published.version),
            url=url,
            seconds=round(seconds, 4),
            reason=reason,
        )
        engine = DeclaredEngine.from_json((answer or {}).get("engine"))
        timings = (answer or {}).get("timings") or {}
        return Delivery(url, seconds, timings, reason, engine.to_json() if engine else None)


class HandoverPublisher:
    """Publishes the versions of one incarnation and logs each handover.

    Args:
        publish: see `Publisher.publish`.
        log: handovers.jsonl.
        group: runs the publishing while training goes on.
    """

    def __init__(
        self,
        publish: Callable[[PublishedVersion], Awaitable[Sequence[Delivery]]],
        log: FencedLog,
        status: TrainerStatus,
        group: asyncio.TaskGroup,
    ) -> None:
        self._publish, self._log, self._status, self._group = publish, log, status, group
        self._newest: PublishedVersion | None = None

    def start(self, published: PublishedVersion, timings: Mapping[str, float], tickets: Sequence[int] = ()) -> None:
        """Start publishing the version of a committed step.

        `timings` are the seconds of the handover so far, without those in `published`; `tickets` are those of the step.
        The group fails with Fenced if another trainer has begun.
        """
        self._newest = published
        self._group.create_task(self._hand_over(published, {**timings, **published.timings}, tickets))

    async def _hand_over(
        self, published: PublishedVersion, timings: Mapping[str, float], tickets: Sequence[int]
    ) -> None:
        started, began, about = time.perf_counter(), time.time(), {"volley.version": str(published.version)}
        step = tracing.of_step(published.version.step) if tickets else None
        with tracing.span("hand over", about, parent=step):
            deliveries = await self._publish(published)
        seconds = time.perf_counter() - started
        for ticket in tickets:
            tracing.record("hand over", tracing.of_ticket(ticket), began, attributes=about, link=step)
        self._status.timed("publish", seconds)
        version = {"step": published.version.step, "version": str(published.version)}
        version |= {"digest": published.digest, "n_bytes": published.n_bytes, "delta_bytes": published.delta_bytes}
        servers = [asdict(delivery) for delivery in deliveries]
        handover = {**version, **timings, "publish_s": seconds, "servers": servers}
        self._status.last_handover = handover
        await self._log.append(handover)
        while self._newest is published and not self._status.stopping:
            await asyncio.sleep(_AGAIN_S if any(one.error for one in deliveries) else _LOOK_S)
            deliveries = await self._publish(published)
