"""The fleet: finds servers, notices versions and deaths, forgets those that left, survives a registry that is away."""

import asyncio
import time

from services.orchestrator.servers.balancer import Balancer, VersionBounds
from services.orchestrator.servers.fleet import DiscoveredServer, Fleet
from services.orchestrator.servers.holding import ServerHolds
from services.rollout.weights.failures import MOST_REFUSALS, FailedVersion
from shared.clients.rollout import RolloutClient
from shared.errors import QueueUnavailable
from shared.types import WeightVersion
from tests.support.asgi import served
from tests.support.engine import RolloutDouble


def fleet_of(balancer, found):
    async def discover():
        if isinstance(found, Exception):
            raise found
        return [DiscoveredServer(url) for url in found]

    return Fleet(balancer, discover, RolloutClient)


async def test_a_server_is_routable_after_its_first_probe_and_gone_when_it_leaves():
    balancer, rollout = Balancer(1), RolloutDouble()
    async with served(rollout.app()) as url:
        found = [url]
        async with fleet_of(balancer, found) as fleet:
            await fleet.refresh()
            assert balancer.pick(VersionBounds()).url == url
            found.clear()
            async with balancer.server(VersionBounds(), time.monotonic() + 1):
                await fleet.refresh()
                assert balancer.pick(VersionBounds()) is None
                assert len(balancer.servers) == 1
            await fleet.refresh()
            assert not balancer.servers


async def test_a_server_that_leaves_while_servers_are_held_is_not_held_and_fails_nothing():
    balancer, version = Balancer(1), WeightVersion(1, 0)
    async with served(RolloutDouble().app()) as url, served(RolloutDouble().app()) as other:
        found = [url, other]
        async with fleet_of(balancer, found) as fleet:
            await fleet.refresh()
            leaving, holds = list(balancer.servers), ServerHolds(balancer, 1.0)
            found.clear()
            await fleet.refresh()
            for server in leaving:
                await holds._request_hold(server, version)
                await holds._release_server(server, version)
            assert not holds.any


async def test_a_dead_server_goes_out_and_comes_back_only_when_ready():
    balancer, rollout = Balancer(1), RolloutDouble()
    async with served(rollout.app()) as url, fleet_of(balancer, [url]) as fleet:
        await fleet.refresh()
        (server,) = balancer.servers
        balancer.fail(server, "no answer")
        rollout.silence(60)
        await fleet.refresh()
        assert "silent for 60 s" in balancer.why_unroutable()
        rollout.silence(0)
        server.probe_at = 0
        await fleet.refresh()
        assert balancer.why_unroutable() is None


async def test_refused_weights_of_a_server_are_known_until_it_does_not_answer():
    balancer, rollout = Balancer(1), RolloutDouble()
    refused = FailedVersion("e000001-s000003", 0.0, "lm_head is wrong", MOST_REFUSALS)
    rollout.refuse(refused)
    async with served(rollout.app()) as url, fleet_of(balancer, [url]) as fleet:
        await fleet.refresh()
        assert balancer.refusals() == {url: "refuses e000001-s000003 for good: lm_head is wrong"}
    async with fleet_of(balancer, [url]) as fleet:
        await fleet.refresh()
    assert balancer.refusals() == {}


async def test_a_server_that_does_not_answer_is_out():
    balancer = Balancer(1)
    async with fleet_of(balancer, ["http://127.0.0.1:9"]) as fleet:
        await fleet.refresh()
    assert "http://127.0.0.1:9" in balancer.why_unroutable()


async def test_a_registry_that_is_away_changes_nothing():
    balancer, rollout = Balancer(1), RolloutDouble()
    async with served(rollout.app()) as url, fleet_of(balancer, [url]) as fleet:
        await fleet.refresh()
        fleet._discover = fleet_of(balancer, QueueUnavailable("away"))._discover
        rollout.serve("e000001-s000003")
        await fleet.refresh()
        assert [str(s.version) for s in balancer.servers] == ["e000001-s000003"]


async def test_a_waiting_episode_is_served_soon_after_the_weights_arrive():
    balancer, rollout = Balancer(0), RolloutDouble()
    async with served(rollout.app()) as url, fleet_of(balancer, [url]) as fleet, asyncio.TaskGroup() as group:
        watching = group.create_task(fleet.watch())
        balancer.set_target(WeightVersion(1, 1), ((1, 0),))
        await asyncio.sleep(0.2)
        rollout.serve("e000001-s000001")
        async with asyncio.timeout(10):
            await balancer.wait_routable(VersionBounds())
        watching.cancel()
