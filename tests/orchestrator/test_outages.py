"""Servers and environments that go away cost time, and no attempt; a sample that ends whatever it meets is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace

import pytest

from services.orchestrator.episodes import dispatch, environments
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.servers import fleet
from services.orchestrator.servers.balancer import Balancer, VersionBounds
from services.orchestrator.servers.fleet import DiscoveredServer, Fleet
from shared.clients.rollout import RolloutClient
from shared.errors import (
    EngineDied,
    NotReady,
    ServiceUnreachable,
    Unavailable,
    VolleyError,
    WeightsUnpublished,
    from_problem,
)
from tests.orchestrator.fakes import (
    BOUNDS,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    runner_of,
    spec,
    with_probes,
)
from tests.support.virtual_time import virtual_time

ONE_ATTEMPT = replace(BOUNDS, max_attempts=1)


@dataclass
class DyingEngine(ScriptedEngine):
    """Fails all requests but each `answers`-th, after `dies_after_s`."""

    answers: int = 10
    error: type[VolleyError] = ServiceUnreachable
    dies_after_s: float = 0.0
    n_asked: int = 0

    async def generate(self, *args, **kwargs):
        self.n_asked += 1
        if self.n_asked % self.answers:
            await asyncio.sleep(self.dies_after_s)
            raise self.error("gone")
        return await super().generate(*args, **kwargs)


@pytest.mark.parametrize("error", [ServiceUnreachable, NotReady, EngineDied, WeightsUnpublished])
async def test_servers_that_die_at_every_turn_cost_no_attempt(error):
    engine = DyingEngine(error=error)
    balancer, budget = balancer_of(engine), TokenBudget(1)
    trajectory = await with_probes(balancer, runner_of(ScriptedEnv(n_turns=3), balancer).run(spec(), budget))
    assert (trajectory.attempt, trajectory.failures) == (0, {error.__name__: 27})
    assert trajectory.token_ids[trajectory.loss_mask == 1].tolist() == [i for ids in engine.outputs for i in ids]


async def test_a_request_that_ends_every_server_fails_its_group():
    """Otherwise one prompt that crashes engines would keep them from all other work."""
    engines = [DyingEngine(answers=1000) for _ in range(3)]
    balancer = balancer_of(*engines)
    dispatcher = dispatcher_of(ScriptedEnv(), balancer, ONE_ATTEMPT)
    group = await with_probes(balancer, run_group(dispatcher, plan(1), 1, VersionBounds()))
    assert group.failure.split()[0] == "ServiceUnreachable"
    assert sum(engine.n_asked for engine in engines) == 10


@virtual_time
async def test_time_lost_with_servers_does_not_count_for_the_deadline():
    engine = DyingEngine(answers=5, dies_after_s=0.3)
    balancer, budget = balancer_of(engine), TokenBudget(1)
    runner = runner_of(ScriptedEnv(n_turns=1), balancer, replace(ONE_ATTEMPT, timeout_s=1.0))
    trajectory = await with_probes(balancer, runner.run(spec(), budget))
    assert trajectory.failures == {"ServiceUnreachable": 4}


class KilledEnv(ScriptedEnv):
    """Dies at the second step of an episode, and forgets all episodes."""

    kills = 0

    async def step(self, episode_id, request_id, content):
        if self.kills < 9 and self.open.get(episode_id) == 1:
            self.kills += 1
            self.open.clear()
            raise ServiceUnreachable("nothing listens there")
        return await super().step(episode_id, request_id, content)


async def test_an_environment_service_that_is_killed_again_and_again_costs_no_attempt(monkeypatch):
    """Episodes begin again, and the model's turns are repeated, not sampled again."""
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(environments, "_AGAIN_S", 0.0)
    env, engine = KilledEnv(n_turns=3), ScriptedEngine()
    trajectory = await dispatcher_of(env, balancer_of(engine), ONE_ATTEMPT).episode(spec(), "train")
    assert (trajectory.attempt, trajectory.reward, len(engine.prompts)) == (0, 3.0, 3)
    assert trajectory.failures == {"ServiceUnreachable": 9}
    assert len(env.created) == 10


class StoringEnv(KilledEnv):
    """The same, whose episodes go on from the number of their steps, or refuse to."""

    refuses = False

    async def create(self, request_id, env, split, index, *, seed, snapshot=None):
        if self.refuses and snapshot is not None:
            raise VolleyError("the snapshot cannot be read")
        opening = await super().create(request_id, env, split, index, seed=seed)
        self.open[opening.episode_id] = snapshot or 0
        return replace(opening, restorable=True)

    async def step(self, episode_id, request_id, content):
        reply = await super().step(episode_id, request_id, content)
        return replace(reply, snapshot=self.open[episode_id])


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_lost_episode_goes_on_from_its_newest_snapshot_or_is_played_again(monkeypatch, refuses):
    """The environment sees each action once; if it refuses its snapshot, it sees them again."""
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(environments, "_AGAIN_S", 0.0)
    env, engine = StoringEnv(n_turns=4), ScriptedEngine()
    env.kills, env.refuses = 8, refuses
    trajectory = await dispatcher_of(env, balancer_of(engine), BOUNDS).episode(spec(), "train")
    assert (trajectory.reward, len(engine.prompts), len(env.texts)) == (4.0, 4, 5 if refuses else 4)
    assert trajectory.failures == {"ServiceUnreachable": 1, **({"VolleyError": 1} if refuses else {})}
    assert (len(env.created), env.open) == (2, {})


class ChangingEnv(KilledEnv):
    """The same, whose every new episode gives other answers."""

    async def step(self, episode_id, request_id, content):
        self.reply = f"next {len(self.created)}"
        return await super().step(episode_id, request_id, content)


async def test_an_environment_that_answers_a_repeated_turn_differently_is_named(monkeypatch):
    """Sampling goes on from that turn."""
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(environments, "_AGAIN_S", 0.0)
    env, engine = ChangingEnv(n_turns=3), ScriptedEngine()
    env.kills = 8
    trajectory = await dispatcher_of(env, balancer_of(engine), ONE_ATTEMPT).episode(spec(), "train")
    assert trajectory.failures == {"ServiceUnreachable": 1, "EpisodeChanged": 1}
    assert (trajectory.reward, trajectory.attempt, len(engine.prompts)) == (3.0, 0, 4)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (502, {}, ServiceUnreachable),
        (503, {}, ServiceUnreachable),
        (504, {}, ServiceUnreachable),
        (503, {"type": "urn:volley:Unavailable"}, Unavailable),
    ],
)
def test_a_proxy_whose_service_is_gone_is_an_outage(status, body, expected):
    error = from_problem(status, body)
    assert type(error) is expected
    assert error.outage == (expected is ServiceUnreachable)


async def test_requests_to_a_machine_that_has_vanished_are_given_up(monkeypatch):
    """Its connections stay open: nothing closes them, and nothing is answered any more."""
    monkeypatch.setattr(fleet, "_PROBE_TIMEOUT_S", 0.05)

    async def keeps_quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(keeps_quiet, "127.0.0.1") as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        balancer = Balancer(1)

        async def discover():
            return [DiscoveredServer(url)]

        async with Fleet(balancer, discover, RolloutClient, give_up_s=0.2) as watching:
            await watching.refresh()
            (server,) = balancer.servers
            server.inflight += 1
            asking = asyncio.create_task(_refused(server.engine.ready()))
            async with asyncio.timeout(60):
                while not asking.done():
                    await asyncio.sleep(0.05)
                    await watching.refresh()
            assert isinstance(asking.result(), ServiceUnreachable)
            await watching.refresh()
            assert [(one.url, one is server, bool(one.out)) for one in balancer.servers] == [(url, False, True)]


async def _refused(request: Coroutine[object, object, object]) -> VolleyError | None:
    try:
        await request
    except VolleyError as error:
        return error
    return None
