"""Groups: complete or failed; a failure of the infrastructure is dispatched again and never becomes a reward."""

import asyncio
from dataclasses import replace

import pytest

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.servers.balancer import VersionBounds
from shared.errors import NotFound, SandboxFailed, Unavailable, VolleyError
from shared.types import Group, WeightVersion
from tests.orchestrator.fakes import (
    Say,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    spec,
    unreachable,
)
from tests.support.tokenizer import tiny_tokenizer
from tests.support.virtual_time import virtual_time

NEED = VersionBounds(0)


async def group_of(env, *engines, n=4, **kwargs):
    return await run_group(dispatcher_of(env, balancer_of(*engines), **kwargs), plan(n), 1, NEED)


async def test_a_group_has_all_siblings_of_one_task_and_survives_the_wire():
    group = await group_of(ScriptedEnv(), ScriptedEngine())
    again = Group.decode(group.encode())
    assert [t.sample_index for t in again.trajectories] == [0, 1, 2, 3]
    assert len({t.task for t in again.trajectories}) == 1
    assert len({t.token_ids.tobytes() for t in again.trajectories}) == 4


async def test_every_sibling_has_its_experts_where_they_are_wanted():
    engine = ScriptedEngine()
    dispatcher = dispatcher_of(ScriptedEnv(), balancer_of(engine))
    group = await run_group(dispatcher, replace(plan(4), routing=True), 1, NEED)
    again = Group.decode(group.encode()).trajectories
    assert [len(t.routed_experts) for t in again] == [len(t.token_ids) - 1 for t in again]


@virtual_time
async def test_siblings_run_at_once():
    env = ScriptedEnv(n_turns=1, delay_s=0.05)
    started = asyncio.get_running_loop().time()
    await group_of(env, ScriptedEngine(), n=16)
    assert asyncio.get_running_loop().time() - started < 0.2


async def test_no_more_episodes_than_allowed_run_at_once():
    env, peak = ScriptedEnv(n_turns=2, delay_s=0.005), 0

    async def watch():
        nonlocal peak
        while True:
            peak = max(peak, len(env.open))
            await asyncio.sleep(0.001)

    watcher = asyncio.ensure_future(watch())
    await group_of(env, ScriptedEngine(), n=12, max_concurrent=3)
    watcher.cancel()
    assert peak == 3


async def test_a_failed_environment_dispatches_the_sibling_again_once_it_is_ready():
    env = ScriptedEnv(create_failures=unreachable(2), not_ready=1)
    group = await group_of(env, ScriptedEngine())
    assert group.failure is None
    assert sorted(sum(t.failures.values()) for t in group.trajectories) == [0, 0, 1, 1]


async def test_a_sibling_dispatched_again_repeats_itself():
    calm = await group_of(ScriptedEnv(), ScriptedEngine())
    rough = await group_of(ScriptedEnv(step_failures=[NotFound("restarted")]), ScriptedEngine())
    assert [t.token_ids.tolist() for t in calm.trajectories] == [t.token_ids.tolist() for t in rough.trajectories]
    assert any(t.failures for t in rough.trajectories)


async def test_an_infrastructure_failure_never_becomes_a_reward():
    env = ScriptedEnv(create_failures=[Unavailable("no worker") for _ in range(1000)])
    group = await group_of(env, ScriptedEngine())
    assert (group.failure, group.trajectories) == ("Unavailable in demo at turn 0", ())
    assert not env.open
    assert Group.decode(group.encode()).failure == group.failure


async def test_attempts_are_shared_between_turns_and_restarts():
    failures = [Unavailable("out of order") for _ in range(3)]
    engines = ScriptedEngine(failures=failures[:1]), ScriptedEngine()
    env = ScriptedEnv(step_failures=failures[1:])
    with pytest.raises(Unavailable):
        await dispatcher_of(env, balancer_of(*engines)).episode(spec(), "train")
    assert len(env.created) == 1


async def test_a_hopeless_failure_is_not_tried_again():
    env = ScriptedEnv(prompt="x " * 500)
    group = await group_of(env, ScriptedEngine())
    assert group.failure == "PromptTooLong in demo at turn 0"
    assert len(env.created) <= 4


async def test_an_outage_of_all_servers_costs_time_and_no_attempt():
    engine = ScriptedEngine()
    balancer = balancer_of(engine)
    server = balancer.servers[0]
    balancer.fail(server, "restarting")

    async def recover():
        await asyncio.sleep(0.05)
        balancer.observe(server, WeightVersion(1, 0))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recover())
        running = tasks.create_task(run_group(dispatcher_of(ScriptedEnv(), balancer), plan(), 1, NEED))
    assert [t.attempt for t in running.result().trajectories] == [0, 0, 0, 0]


@virtual_time
async def test_an_outage_may_last_longer_than_an_episode():
    engine, impatient = ScriptedEngine(), TokenBounds(256, 16, 4, 0.3, 1)
    balancer = balancer_of(engine)
    balancer.fail(balancer.servers[0], "restarting")
    asyncio.get_running_loop().call_later(0.6, balancer.observe, balancer.servers[0], WeightVersion(1, 0))
    group = await run_group(dispatcher_of(ScriptedEnv(), balancer, impatient), plan(), 1, NEED)
    assert [t.attempt for t in group.trajectories] == [0, 0, 0, 0]


async def test_an_environment_that_is_broken_when_asked_whether_it_is_ready_costs_an_attempt():
    class BrokenEngine(ScriptedEnv):
        async def ready(self):
            if self.not_ready:
                self.not_ready -= 1
                raise VolleyError("a defect")

    env = BrokenEngine(step_failures=[NotFound("restarted")], not_ready=1)
    trajectory = await dispatcher_of(env, balancer_of(ScriptedEngine())).episode(spec(), "train")
    assert trajectory.failures == {"EpisodeLost": 1, "VolleyError": 1}


class OtherWords(ScriptedEnv):
    """Opens every episode with other words."""

    async def create(self, request_id, env, split, index, *, seed, snapshot=None):
        self.prompt = f"play number {len(self.created)}"
        return await super().create(request_id, env, split, index, seed=seed)


def said(ids):
    return Say([*ids, tiny_tokenizer().eos_id])


async def test_an_attempt_that_begins_again_says_the_same_to_an_environment_that_does():
    """A server that samples otherwise would put another answer in the place of the one that the environment failed."""
    engine = ScriptedEngine(script=[said([11, 12]), said([13]), said([14]), said([15])])

    class FailsOnce(ScriptedEnv):
        async def step(self, episode_id, request_id, content):
            if len(self.texts) == 1:
                self.texts.append(content)
                raise SandboxFailed("KeyError: lost")
            return await super().step(episode_id, request_id, content)

    env = FailsOnce(n_turns=3)
    group = await group_of(env, engine, n=1)
    (only,) = group.trajectories
    assert env.texts[:2] == env.texts[2:4], "the same two turns, and then the third"
    assert (len(engine.outputs), only.attempt, dict(only.failures)) == (3, 1, {"SandboxFailed": 1})
    assert only.token_ids[only.loss_mask == 1].tolist() == [i for one in engine.outputs for i in one]


async def test_an_environment_that_says_something_else_is_answered_anew():
    engine = ScriptedEngine(script=[said([11, 12]), said([13, 14])])
    group = await group_of(OtherWords(n_turns=1, step_failures=[SandboxFailed("KeyError: lost")]), engine, n=1)
    (only,) = group.trajectories
    assert only.token_ids[only.loss_mask == 1].tolist() == engine.outputs[1]


async def test_turns_of_weights_that_were_undone_are_sampled_again():
    engine = ScriptedEngine(script=[said([11, 12]), said([13, 14])])
    balancer = balancer_of(engine)

    class Undoes(ScriptedEnv):
        async def step(self, episode_id, request_id, content):
            if not self.texts:
                self.texts.append(content)
                engine.version = WeightVersion(2, 0)
                balancer.set_target(engine.version, ((2, 0),))
                balancer.observe(balancer.servers[0], engine.version)
                raise SandboxFailed("KeyError: lost")
            return await super().step(episode_id, request_id, content)

    group = await run_group(dispatcher_of(Undoes(n_turns=1), balancer), plan(1), 1, NEED)
    (only,) = group.trajectories
    assert only.token_ids[only.loss_mask == 1].tolist() == engine.outputs[1]


async def test_failed_attempts_are_counted_against_those_that_reached_the_turn():
    """An answer that ends the episode at its first turn does not reach the turn that fails."""

    class FailsLate(ScriptedEnv):
        async def step(self, episode_id, request_id, content):
            if self.open[episode_id] == 2:
                raise SandboxFailed("KeyError: lost")
            return await super().step(episode_id, request_id, content)

    short, late = ScriptedEnv(n_turns=1), FailsLate(n_turns=9)
    dispatchers = [dispatcher_of(env, balancer_of(ScriptedEngine())) for env in (short, late)]
    status = dispatchers[0]._status
    dispatchers[1]._status = dispatchers[1]._runner._status = dispatchers[0]._runner._status = status
    for ticket in range(1, 30):
        await run_group(dispatchers[0], plan(2), ticket, NEED)
    assert status.warnings == []
    failed = [await run_group(dispatchers[1], plan(1), 100 + ticket, NEED) for ticket in range(4)]
    assert {group.failure for group in failed} == {"SandboxFailed in demo at turn 3"}
    tally = status.by_env["demo"]
    assert (tally.attempts.turns[3].reached, tally.attempts.turns[3].failed) == (4, 4)
    (warning,) = status.warnings
    assert warning.startswith("demo: at turn 3, 4 of the 4 attempts that reached it failed, the last: SandboxFailed: ")
