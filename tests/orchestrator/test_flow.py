"""Flow control: what is slow is waited for and never piled up, and nothing is repeated inside something that is
repeated.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.errors import Unavailable, VolleyError
from shared.queue.records import Published
from shared.services_schema import Limits
from shared.types import Trajectory, WeightVersion
from shared.web.http import create_app
from tests.orchestrator.fakes import (
    BOUNDS,
    MemoryQueue,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    spec,
)
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.tokenizer import tiny_tokenizer
from tests.support.virtual_time import virtual_time

TERMS = Admission(batch=2, max_staleness=1, total=10_000, lease_s=60, patience_s=60)
N_GROUPS, N_SIBLINGS, N_EPISODES = 3, 4, 5


@pytest.mark.parametrize("slow", ["env", "rollout"])
@virtual_time
async def test_what_is_slow_holds_everything_before_it_back(slow):
    """A thousand tickets are free to take; what is under way stays within the bounds all the time."""
    env, engine, queue = ScriptedEnv(n_turns=2), ScriptedEngine(), MemoryQueue(limit=1000)
    {"env": env, "rollout": engine}[slow].delay_s = 3600
    dispatcher, gate = dispatcher_of(env, balancer_of(engine), max_concurrent=N_EPISODES), ReservationGate()
    gate.release(ReservationGate.START)
    loop = TicketLoop(
        queue,
        gate,
        RunStatus(),
        TERMS,
        n_groups=N_GROUPS,
        run_group=lambda ticket, need: run_group(dispatcher, plan(N_SIBLINGS), ticket, need),
    )
    running = asyncio.ensure_future(loop.run())
    peak = Counter()
    for _ in range(200):
        await asyncio.sleep(0.005)
        now = {
            "tickets": len(loop.leased),
            "episodes": len(env.open),
            "requests": len(engine.running),
            "tasks": len(asyncio.all_tasks()),
        }
        peak |= Counter(now)
    running.cancel()
    await asyncio.wait([running])
    assert peak["tickets"] <= N_GROUPS
    assert max(peak["episodes"], peak["requests"]) <= N_EPISODES
    assert peak["tasks"] <= N_GROUPS * (N_SIBLINGS + 1) + 10
    assert queue.issued == N_GROUPS


@virtual_time
async def test_episodes_that_wait_for_newer_weights_leave_the_slots_to_an_evaluation():
    balancer = balancer_of(engine := ScriptedEngine(version=WeightVersion(1, 5)), max_staleness=0)
    dispatcher = dispatcher_of(ScriptedEnv(n_turns=1), balancer, max_concurrent=1)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        newer = group.create_task(dispatcher.episode(spec(need=VersionBounds(min_step=6)), "train"))
        await asyncio.sleep(0.05)
        measured = spec(ticket=0, need=VersionBounds(min_step=5, max_step=5, strict=True))
        await dispatcher.episode(measured, "eval")
        assert not newer.done()
        engine.version = WeightVersion(1, 6)
        balancer.observe(balancer.servers[0], engine.version)
    assert newer.result().oldest() == WeightVersion(1, 6)


@virtual_time
async def test_groups_that_cannot_be_published_keep_their_place():
    queue = MemoryQueue(limit=1000)
    dispatcher, gate = dispatcher_of(ScriptedEnv(n_turns=1), balancer_of(ScriptedEngine())), ReservationGate()
    gate.release(ReservationGate.START)
    queue.answers = [Published.NOT_READY] * 10_000
    loop = TicketLoop(
        queue,
        gate,
        RunStatus(),
        TERMS,
        n_groups=N_GROUPS,
        run_group=lambda t, need: run_group(dispatcher, plan(2), t, need),
    )
    running = asyncio.ensure_future(loop.run())
    await asyncio.sleep(1)
    assert queue.issued == len(loop.leased) == N_GROUPS
    running.cancel()
    await asyncio.wait([running])


def test_the_window_of_rates_is_bounded_though_nobody_reads_it():
    now = 0.0
    status = RunStatus(lambda: now)
    for i in range(100_000):
        now = i * 0.01
        status.ended(TRAJECTORY)
    assert len(status._tokens) <= 31
    assert status.tokens_per_s() == pytest.approx(3 * 100, rel=0.05)


TRAJECTORY = Trajectory(
    1,
    0,
    0,
    "e",
    "t",
    1,
    np.ones(4, np.int32),
    np.array([0, 1, 1, 1], np.uint8),
    np.zeros(4, np.float32),
    (),
    (),
    0.0,
    False,
    "completed",
    timings={"total_s": 1.0},
)


@asynccontextmanager
async def counted(failing):
    """A real client of an environment service whose route `failing` always answers 503, and a count of the requests it
    gets.
    """
    requests = Counter()
    app = create_app("env", limits=Limits(), tokens=None, ready=lambda: None)

    @app.api_route("/{path:path}", methods=["POST", "DELETE"])
    async def answer(request: Request, path: str) -> Response:
        name = "step" if path.endswith("step") else request.method
        requests[name] += 1
        if name == failing:
            raise Unavailable("out of order")
        return Response(
            '{"episode_id": "e", "task": "t", "messages": [{"role": "user", "content": "hi"}]}',
            media_type="application/json",
        )

    async with served(app) as url, EnvClient(url) as client:
        yield client, requests


@pytest.mark.parametrize("failing", ["POST", "step"])
async def test_a_service_that_fails_is_asked_as_often_as_there_are_attempts(failing):
    async with counted(failing) as (client, requests):
        with pytest.raises(VolleyError):
            await dispatcher_of(client, balancer_of(ScriptedEngine())).episode(spec(), "train")
    assert requests[failing] == BOUNDS.max_attempts


async def test_a_rollout_server_that_fails_is_asked_as_often_as_there_are_attempts():
    fake, status = RolloutDouble(), RunStatus()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(fake.app()))
        client = await stack.enter_async_context(RolloutClient(url))
        balancer = Balancer(1)
        balancer.add(server := ServerLoad(url, client, version=WeightVersion(1, 0)))
        fake.answer = [-5]  # no token: the client makes it an error
        runner = EpisodeRunner(tiny_tokenizer(), ScriptedEnv(), balancer, status, BOUNDS)
        dispatcher = Dispatcher(runner, balancer, status, slots=Slots(4), max_attempts=3)
        probing = asyncio.ensure_future(keep_well(balancer, server))
        with pytest.raises(Unavailable, match="negative"):
            await dispatcher.episode(spec(), "train")
        probing.cancel()
    assert fake.engine.n_requests == 3


async def keep_well(balancer, server):
    while True:
        balancer.observe(server, WeightVersion(1, 0))
        await asyncio.sleep(0.005)
