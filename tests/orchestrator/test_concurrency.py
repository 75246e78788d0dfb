"""Slots of episodes, their number, and evaluations beside training."""

import asyncio
from collections import deque

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.servers.fleet import DiscoveredServer, Fleet
from services.orchestrator.servers.slots import Slots
from shared.clients.rollout import EngineLoad, RolloutClient
from shared.errors import DecodeError, ServiceUnreachable
from tests.orchestrator.fakes import ScriptedEngine, balancer_of
from volley_algorithms.generation.concurrency import AdaptiveConcurrency


async def start(slots, purposes):
    """Start an episode for each purpose; return tasks, which run until they are cancelled."""

    async def one(purpose):
        async with slots.taken(purpose):
            running.append(purpose)
            await asyncio.sleep(3600)

    running = []
    tasks = [asyncio.ensure_future(one(purpose)) for purpose in purposes]
    await asyncio.sleep(0.01)
    return running, tasks


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_first_come_first_served_without_a_share():
    running, tasks = await start(Slots(3), ["train", "eval", "train", "eval"])
    assert running == ["train", "eval", "train"]
    await end(tasks[0])
    assert running[3:] == ["eval"]
    await end(*tasks)


async def test_a_limit_that_falls_stops_nothing_and_one_that_rises_starts_more():
    slots = Slots(3)
    running, tasks = await start(slots, ["train"] * 6)
    slots.limit = 1
    await end(tasks[0], tasks[1])
    assert (len(running), slots.n_running, slots.n_waiting) == (3, 1, 3)
    slots.limit = 5
    await asyncio.sleep(0.01)
    assert (len(running), slots.n_running, slots.n_waiting) == (6, 4, 0)
    await end(*tasks)
    assert (slots.n_running, slots.n_waiting) == (0, 0)


async def test_an_evaluation_has_its_share_and_training_the_rest():
    slots = Slots(8, eval_share=0.25)
    running, training = await start(slots, ["train"] * 20)
    _, evaluating = await start(slots, ["eval"] * 6)
    await end(*training[:4])
    assert slots._running == {"train": 6, "eval": 2}
    await end(*training)
    assert slots._running == {"train": 0, "eval": 6}
    await end(*evaluating)
    assert running.count("train") > 8


@given(
    st.lists(st.tuples(st.sampled_from(["train", "eval"]), st.sampled_from(["start", "cancel", "limit"])), max_size=40),
    st.sampled_from([None, 0.3, 1.0]),
)
def test_no_slot_is_lost_or_given_twice(actions, share):
    async def play():
        slots, tasks = Slots(3, share), []
        for number, (purpose, action) in enumerate(actions):
            if action == "start":
                tasks.append(asyncio.ensure_future(hold(slots, purpose)))
            elif action == "limit":
                slots.limit = number % 5
            elif tasks:
                tasks.pop(number % len(tasks)).cancel()
            if number % 2:
                await asyncio.sleep(0)
        slots.limit = 100
        for _ in range(5):
            await asyncio.sleep(0)
        assert slots.n_running == len(tasks)
        await end(*tasks)
        assert (slots.n_running, slots.n_waiting) == (0, 0)

    async def hold(slots, purpose):
        async with slots.taken(purpose):
            await asyncio.sleep(3600)

    asyncio.run(play())


class Cluster:
    """Servers of 16 slots whose requests are the running episodes, but for those that wait for their environment."""

    def __init__(self, slots, n_servers, in_env=0.5):
        self.slots, self.n, self.in_env = slots, n_servers, in_env

    def loads(self):
        requests = round(self.slots.limit * (1 - self.in_env) / self.n)
        return [EngineLoad(min(16, requests), max(0, requests - 16), 16, 1.0)] * self.n

    def settle(self, concurrency, n=40):
        limits = []
        for _ in range(n):
            self.slots._waiting = {"train": deque((0, asyncio.Future()) for _ in range(512)), "eval": deque()}
            self.slots._running["train"] = self.slots.limit
            concurrency.observe(self.loads())
            limits.append(self.slots.limit)
        return limits[n // 2 :]


async def test_the_number_follows_servers_that_come_and_go_and_the_share_of_time_in_environments():
    slots = Slots(512)
    concurrency = AdaptiveConcurrency(slots, 8)
    cluster = Cluster(slots, 4)
    for n_servers, in_env in ((4, 0.5), (1, 0.5), (4, 0.5), (4, 0.0), (4, 0.75)):
        cluster.n, cluster.in_env = n_servers, in_env
        right = 16 * n_servers / (1 - in_env)
        limits = cluster.settle(concurrency, 80)
        assert 0.8 * right <= min(limits), (n_servers, in_env)
        assert max(limits) <= 1.3 * right + 2 * n_servers, (n_servers, in_env)


async def test_the_number_stays_within_its_bounds_and_waits_while_no_server_is_known():
    slots = Slots(64)
    concurrency = AdaptiveConcurrency(slots, 8)
    assert slots.limit == 8
    concurrency.observe([])
    assert slots.limit == 8
    cluster = Cluster(slots, 100)
    assert set(cluster.settle(concurrency)) == {64}
    for _ in range(100):
        slots._running["train"] = slots.limit
        concurrency.observe([EngineLoad(1, 50, 1, 0.0)])
    assert slots.limit == 8


async def test_requests_that_wait_for_the_next_step_and_a_pool_full_of_prefixes_are_no_overload():
    slots = Slots(256)
    concurrency = AdaptiveConcurrency(slots, 8)
    for _ in range(20):
        slots._waiting = {"train": deque((0, asyncio.Future()) for _ in range(512)), "eval": deque()}
        slots._running["train"] = slots.limit
        concurrency.observe([EngineLoad(slots.limit // 2, slots.limit // 2, 256, 0.0)])
    assert slots.limit == 256
    slots._running["train"] = 256
    concurrency.observe([EngineLoad(20, 100, 256, 0.0)])
    assert slots.limit == 256
    concurrency.observe([EngineLoad(20, 100, 256, 0.0)])
    assert slots.limit == 218


async def test_the_fleet_asks_servers_that_are_in_for_their_load():
    class Reporting(ScriptedEngine):
        async def load(self):
            if not self.well:
                raise ServiceUnreachable("engine is down")
            return EngineLoad(3, 1, 16, 0.5)

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    engines, seen = {"http://a": Reporting(), "http://b": Reporting(well=False)}, []

    async def discover():
        return [DiscoveredServer(url) for url in engines]

    async with Fleet(balancer_of(), discover, engines.__getitem__, seen.append) as fleet:
        await fleet.refresh()
        await fleet.refresh()
    assert seen == [[EngineLoad(3, 1, 16, 0.5)]]


@pytest.mark.parametrize("body", [{}, {"internal_state": None}, {"internal_state": {"running": "x"}}, []])
async def test_a_load_that_cannot_be_read_is_an_error_of_the_tree(body):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    async with RolloutClient("http://server", transport=transport) as client:
        with pytest.raises(DecodeError):
            await client.load()
