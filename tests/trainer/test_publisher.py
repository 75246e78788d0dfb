import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.trainer.loop.publisher import Publisher
from shared.errors import QueueUnavailable, ServiceUnreachable

V1, V2, V3 = (Path(f"/runs/r/checkpoints/e000001-s00000{n}") for n in (1, 2, 3))


class Servers:
    """Rollout servers that note what they are told; `down` ones do not answer, `gate` holds up the `hung`
    ones, or all.
    """

    def __init__(self, *urls: str, down: tuple[str, ...] = (), hung: tuple[str, ...] = ()) -> None:
        self.urls, self.down, self.hung, self.told, self.gate = urls, down, hung or urls, [], asyncio.Event()
        self.gate.set()

    async def addresses(self) -> tuple[str, ...]:
        return self.urls

    @asynccontextmanager
    async def connect(self, url: str):
        yield RecordingServer(self, url)


class RecordingServer:
    def __init__(self, all_: Servers, url: str) -> None:
        self._all, self._url = all_, url

    async def update_weights(self, manifest: Path, mode: str) -> dict[str, Any]:
        self._all.told.append((self._url, manifest.parent.name, mode))
        if self._url in self._all.hung:
            await self._all.gate.wait()
        if self._url in self._all.down:
            raise ServiceUnreachable(f"{self._url} did not answer")
        return {"timings": {"stage_s": 0.5}}


async def test_every_server_is_told_and_a_dead_one_harms_nobody():
    servers = Servers("a", "b", "c", down=("b",))
    deliveries = await Publisher(servers.addresses, servers.connect, "retract").publish(V1)
    assert {(d.url, d.error is None) for d in deliveries} == {("a", True), ("b", False), ("c", True)}
    assert deliveries[0].timings == {"stage_s": 0.5}
    assert sorted(servers.told) == [(u, V1.name, "retract") for u in "abc"]


async def test_servers_are_told_at_the_same_time():
    servers = Servers("a", "b")
    servers.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(Publisher(servers.addresses, servers.connect, "retract").publish(V1))
        while len(servers.told) < 2:
            await asyncio.sleep(0)
        servers.gate.set()


async def test_a_newer_version_makes_a_waiting_one_superfluous():
    servers = Servers("a")
    servers.gate.clear()
    publisher = Publisher(servers.addresses, servers.connect, "retract")
    async with asyncio.TaskGroup() as group:
        for folder in (V1, V2, V3):
            group.create_task(publisher.publish(folder))
            while not servers.told:
                await asyncio.sleep(0)
        servers.gate.set()
    assert [version for _, version, _ in servers.told] == [V1.name, V3.name]


async def test_a_server_that_hangs_delays_no_other():
    servers = Servers("a", "b", hung=("b",))
    servers.gate.clear()
    publisher = Publisher(servers.addresses, servers.connect, "retract")
    async with asyncio.TaskGroup() as group:
        for folder in (V1, V2):
            group.create_task(publisher.publish(folder))
            async with asyncio.timeout(60):
                while ("a", folder.name, "retract") not in servers.told:
                    await asyncio.sleep(0)
        servers.gate.set()
    assert [version for url, version, _ in servers.told if url == "b"] == [V1.name, V2.name]


async def test_no_registry_is_no_catastrophe():
    async def addresses():
        raise QueueUnavailable("Redis did not answer")

    assert await Publisher(addresses, Servers().connect, "retract").publish(V1) == []
