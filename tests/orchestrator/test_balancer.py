"""Routing: fresh enough, least loaded, sticky with limits, out after a failure, and a reason when
there is no server.
"""

import asyncio
import time

import pytest

from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from shared.clients.rollout import RefusedWeights
from shared.types import WeightVersion
from tests.orchestrator.fakes import ScriptedEngine

ANY = VersionBounds()


class BalancerClock:
    now = 0.0

    def __call__(self):
        return self.now


def make(*versions, max_staleness=1, target=(1, 5), lineage=((1, 0), (2, 5)), clock=time.monotonic):
    balancer = Balancer(max_staleness, clock)
    servers = [
        ServerLoad(f"s{i}", ScriptedEngine(), version=WeightVersion(*v) if v else None) for i, v in enumerate(versions)
    ]
    for server in servers:
        balancer.add(server)
    balancer.set_target(WeightVersion(*target), lineage[: target[0]])
    return balancer, servers


def routable(balancer, need=ANY):
    found, tried = set(), []
    while (server := balancer.pick(need)) is not None:
        found.add(server.url)
        server.leaving = True
        tried.append(server)
    for server in tried:
        server.leaving = False
    return found


def test_a_server_may_lag_eta_steps_and_not_more():
    balancer, _ = make((1, 5), (1, 4), (1, 3), None)
    assert routable(balancer) == {"s0", "s1"}


def test_a_need_raises_the_floor_and_sets_a_ceiling():
    balancer, _ = make((1, 5), (1, 4), (1, 6))
    assert routable(balancer, VersionBounds(min_step=5)) == {"s0", "s2"}
    assert routable(balancer, VersionBounds(min_step=5, max_step=5)) == {"s0"}


@pytest.mark.parametrize("state", ["in", "out", "leaving"])
def test_a_server_with_fresh_weights_never_counts_as_lost(state):
    balancer, (server,) = make((1, 4))
    server.refused = RefusedWeights(WeightVersion(1, 5), "lm_head is wrong")
    server.leaving = state == "leaving"
    if state == "out":
        balancer.fail(server, "connection reset")
    assert balancer.why_refused() is None
    server.version = WeightVersion(1, 3)
    assert balancer.why_refused() == "s0 refuses e000001-s000005 for good: lm_head is wrong"


@pytest.mark.parametrize(("refused", "counts"), [((1, 5), False), ((2, 4), False), ((2, 5), True), ((2, 6), True)])
def test_a_refusal_counts_if_it_is_of_the_newest_weights(refused, counts):
    balancer, (server,) = make((1, 3), target=(2, 5))
    server.refused = RefusedWeights(WeightVersion(*refused), "lm_head is wrong")
    assert bool(balancer.refusals()) == counts


def test_after_a_rollback_the_higher_epoch_wins():
    balancer, _ = make((1, 9), (2, 5), (1, 5), target=(2, 5))
    assert routable(balancer) == {"s1", "s2"}


def test_weights_that_were_undone_stay_out_when_their_step_is_made_again():
    balancer, _ = make((1, 7), (2, 7), (1, 5), target=(2, 7), max_staleness=3)
    assert routable(balancer) == {"s1", "s2"}
    assert "s0: has e000001-s000007, which was undone" in balancer.why_unroutable(VersionBounds(min_step=8))


async def test_a_floor_that_fell_with_the_trainer_wakes_who_waits_for_it():
    balancer, (server,) = make((1, 3), target=(1, 6), lineage=((1, 0), (2, 3)))
    need = VersionBounds(min_step=6)

    async def go_back():
        await balancer.wait_for_demand(5)
        need.lower(3)
        balancer.set_target(WeightVersion(2, 3), ((1, 0), (2, 3)))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(go_back())
        async with balancer.server(need) as chosen:
            assert chosen is server


def test_the_least_loaded_server_is_taken_by_its_capacity():
    balancer, (small, large) = make((1, 5), (1, 5))
    small.capacity, large.capacity = 1, 8
    small.inflight, large.inflight = 1, 4
    assert balancer.pick(ANY) is large


def test_sticky_until_overloaded():
    balancer, (first, second) = make((1, 5), (1, 5))
    first.inflight, second.inflight = 6, 3
    assert balancer.pick(ANY, "s0") is first
    first.inflight = 30
    assert balancer.pick(ANY, "s0") is second


def test_a_failure_takes_a_server_out_until_a_probe_finds_it_well():
    clock = BalancerClock()
    balancer, (server,) = make((1, 5), clock=clock)
    balancer.fail(server, "no answer")
    assert balancer.pick(ANY) is None
    assert balancer.probe_due(server)
    clock.now = 60
    assert balancer.pick(ANY) is None
    balancer.observe(server, WeightVersion(1, 5))
    assert balancer.pick(ANY) is server


def test_probes_come_later_and_later_until_a_request_succeeds():
    clock = BalancerClock()
    balancer, (server,) = make((1, 5), clock=clock)
    waits = []
    for _ in range(7):
        balancer.fail(server, "no answer")
        waits.append(server.probe_at - clock.now)
        clock.now = server.probe_at
        balancer.observe(server, WeightVersion(1, 5))
    assert waits == [0, 0.5, 1, 2, 4, 8, 8]
    balancer.succeeded(server, "e000001-s000006")
    balancer.fail(server, "no answer")
    assert server.probe_at == clock.now
    assert server.version == WeightVersion(1, 6)


def test_many_requests_that_fail_while_a_server_is_out_count_once():
    clock = BalancerClock()
    balancer, (server,) = make((1, 5), clock=clock)
    server.failures = 1
    for _ in range(100):
        balancer.fail(server, "no answer")
    assert server.failures == 2


async def test_waiting_ends_when_a_server_gets_fresh_weights():
    balancer, (server,) = make((1, 3))

    async def update():
        await balancer.wait_for_demand(5)
        balancer.observe(server, WeightVersion(1, 5))

    async with asyncio.TaskGroup() as group:
        group.create_task(update())
        async with balancer.server(ANY) as chosen:
            assert chosen is server
            assert server.inflight == 1
    assert server.inflight == 0


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((), "no rollout server is known"),
        (((1, 3),), "s0: has e000001-s000003, step 4 is needed"),
        ((None,), "no weight version"),
    ],
)
def test_where_no_server_can_be_used_the_reason_is_named(versions, reason):
    balancer, _ = make(*versions)
    assert reason in balancer.why_unroutable(ANY)


async def test_a_newer_target_takes_a_lagging_server_away():
    balancer, (server,) = make((1, 5))
    assert balancer.pick(ANY) is server
    balancer.set_target(WeightVersion(1, 7), ((1, 0),))
    assert "step 6 is needed" in balancer.why_unroutable()
