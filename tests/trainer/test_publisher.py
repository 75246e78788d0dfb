import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.trainer.publishing import publisher as publishing
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.publishing.publisher import HandoverPublisher, Publisher
from services.trainer.status import TrainerStatus
from shared.engines import DeclaredEngine
from shared.errors import QueueUnavailable, ServiceUnreachable
from shared.published.manifest import Chunk, WeightOffer
from shared.types import WeightVersion

V1, V2, V3 = (
    PublishedVersion(WeightVersion(1, n), Chunk(f"{n:064x}", 9), f"{n + 9:064x}", 9, 0, {}) for n in (1, 2, 3)
)
PLAIN = DeclaredEngine("plain", ("exact_ids", "spans"))
TRAINER = "http://trainer"


class Servers:
    """Rollout servers that note what they are told; `down` ones do not answer, `gate` holds up the `hung`
    ones, or all.
    """

    def __init__(self, *urls: str, down: tuple[str, ...] = (), hung: tuple[str, ...] = ()) -> None:
        self.urls, self.down, self.hung, self.told, self.gate = urls, down, hung or urls, [], asyncio.Event()
        self.announced, self.sources = list[PublishedVersion](), dict[str, set[str]]()
        self.serves, self.engines = dict[str, WeightVersion](), dict[str, Any]()
        self.gate.set()

    async def served(self) -> dict[str, WeightVersion | None]:
        return {url: self.serves.get(url) for url in self.urls}

    def publisher(self) -> Publisher:
        return Publisher(TRAINER, self.served, self.announced.append, self.connect, "retract")

    @asynccontextmanager
    async def connect(self, url: str):
        yield RecordingServer(self, url)


class RecordingServer:
    def __init__(self, all_: Servers, url: str) -> None:
        self._all, self._url = all_, url

    async def update_weights(self, offer: WeightOffer, mode: str) -> dict[str, Any]:
        self._all.told.append((self._url, offer.version, mode))
        self._all.sources[self._url] = set(offer.sources)
        if self._url in self._all.hung:
            await self._all.gate.wait()
        if self._url in self._all.down:
            raise ServiceUnreachable(f"{self._url} did not answer")
        return {"timings": {"stage_s": 0.5}, "engine": self._all.engines.get(self._url)}


async def test_every_server_is_told_and_a_dead_one_harms_nobody():
    servers = Servers("a", "b", "c", down=("b",))
    deliveries = await servers.publisher().publish(V1)
    assert {(d.url, d.error is None) for d in deliveries} == {("a", True), ("b", False), ("c", True)}
    assert deliveries[0].timings == {"stage_s": 0.5}
    assert servers.announced == [V1]
    assert servers.sources == {"a": {TRAINER, "b", "c"}, "b": {TRAINER, "a", "c"}, "c": {TRAINER, "a", "b"}}
    assert sorted(servers.told) == [(u, str(V1.version), "retract") for u in "abc"]


async def test_the_engine_that_took_a_version_is_recorded():
    servers = Servers("a", "b", "c", "d", down=("d",))
    servers.engines = {"a": PLAIN.to_json(), "b": {"kind": 7}, "d": PLAIN.to_json()}
    deliveries = await servers.publisher().publish(V1)
    assert {d.url: d.engine for d in deliveries} == {"a": PLAIN.to_json(), "b": None, "c": None, "d": None}


async def test_servers_are_told_at_the_same_time():
    servers = Servers("a", "b")
    servers.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(servers.publisher().publish(V1))
        while len(servers.told) < 2:
            await asyncio.sleep(0)
        servers.gate.set()


async def test_a_newer_version_makes_a_waiting_one_superfluous():
    servers = Servers("a")
    servers.gate.clear()
    publisher = servers.publisher()
    async with asyncio.TaskGroup() as group:
        for version in (V1, V2, V3):
            group.create_task(publisher.publish(version))
            while not servers.told:
                await asyncio.sleep(0)
        servers.gate.set()
    assert [version for _, version, _ in servers.told] == [str(V1.version), str(V3.version)]


async def test_a_server_that_hangs_delays_no_other():
    servers = Servers("a", "b", hung=("b",))
    servers.gate.clear()
    publisher = servers.publisher()
    async with asyncio.TaskGroup() as group:
        for version in (V1, V2):
            group.create_task(publisher.publish(version))
            async with asyncio.timeout(60):
                while ("a", str(version.version), "retract") not in servers.told:
                    await asyncio.sleep(0)
        servers.gate.set()
    assert [version for url, version, _ in servers.told if url == "b"] == [str(V1.version), str(V2.version)]


async def test_no_registry_is_no_catastrophe():
    async def served():
        raise QueueUnavailable("Redis did not answer")

    servers = Servers()
    servers.served = served
    publisher = servers.publisher()
    assert await publisher.publish(V1) == []
    assert servers.announced == [V1]  # who asks still learns of it
    assert await publisher.sources() == (TRAINER,)


async def test_a_version_that_is_offered_again_never_takes_the_place_of_a_newer_one():
    servers = Servers("a", down=("a",))
    publisher = servers.publisher()
    await publisher.publish(V1)
    await publisher.publish(V2)
    assert await publisher.publish(V1) == []
    assert servers.announced == [V1, V2]
    assert [version for _, version, _ in servers.told] == [str(V1.version), str(V2.version)]


class Lines:
    def __init__(self) -> None:
        self.lines = list[dict[str, Any]]()

    async def append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


async def test_a_server_that_was_away_is_told_again_until_it_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "_AGAIN_S", 0.01)
    servers, lines, status = Servers("a", "b", down=("b",)), Lines(), TrainerStatus("r", 1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        offers = HandoverPublisher(servers.publisher().publish, lines, status, group)  # type: ignore[arg-type]
        offers.start(V1, {})
        while len(servers.told) < 6:
            await asyncio.sleep(0)
        offers.start(V2, {})
        servers.down = ()
        while [url for url, version, _ in servers.told if version == str(V2.version)] < ["a", "b"]:
            await asyncio.sleep(0)
        status.stop()
    assert {url for url, version, _ in servers.told if version == str(V1.version)} == {"a", "b"}
    assert [url for url, version, _ in servers.told if version == str(V1.version)].count("a") == 1
    assert [line["version"] for line in lines.lines] == [str(V1.version), str(V2.version)]


async def test_a_server_that_began_anew_with_an_older_version_is_told_again(monkeypatch: pytest.MonkeyPatch):
    """It asked for the newest one where no trainer answered. Steps may wait for its tokens: no newer one would come."""
    monkeypatch.setattr(publishing, "_LOOK_S", 0.01)
    servers, lines, status = Servers("a", "b"), Lines(), TrainerStatus("r", 1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        offers = HandoverPublisher(servers.publisher().publish, lines, status, group)  # type: ignore[arg-type]
        offers.start(V2, {})
        while len(servers.told) < 2:
            await asyncio.sleep(0)
        servers.serves = {"a": V2.version, "b": V1.version}
        while len(servers.told) < 3:
            await asyncio.sleep(0)
        servers.serves["b"] = V2.version
        before = len(servers.told)
        await asyncio.sleep(0.1)
        assert len(servers.told) <= before + 1  # one may have been on its way
        status.stop()
    assert {url for url, _, _ in servers.told[2:]} == {"b"}
