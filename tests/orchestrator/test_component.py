"""The whole service over HTTP: real Redis, real environments, rollouts without a model and a fake trainer."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import orjson
import pytest

from services.env import app as env_app
from services.env import settings as env_settings
from services.orchestrator.app import open_orchestrator
from services.orchestrator.settings import from_config
from shared import config
from shared.errors import ConfigError
from shared.queue.queue import Finished, TicketQueue
from shared.types import Group
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.records import records_app
from tests.support.redis import begun, configured
from tests.support.tokenizer import FOLDER


def run_config(folder, **sections):
    tree = {
        "run": {"name": "demo", "dir": str(folder), "seed": 3},
        "model": {"path": str(FOLDER)},
        "data": {"env": "frozen_lake", "n_eval_tasks": 12},
        "grpo_config": {"num_generations": 3, "off_policy_steps": 1, "max_response_length": 16},
        "trainer": {"max_steps": 4, "groups_per_step": 2},
        "rollout": {"engine": {"context_length": 512}},
        "orchestrator": {
            "max_concurrent_episodes": 24,
            "max_turns": 3,
            "lease_s": 3,
            "episode_timeout_s": 20,
            "eval_every_n_steps": 2,
        },
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config.validate(tree).config


class TrainerClient:
    """Takes groups in any order, a step for every B of them, and publishes "weights" before it commits.

    At step `pauses_at` it waits until `resumed` is set.
    """

    def __init__(self, redis, rollouts, batch=2, pauses_at=None):
        self.queue, self.rollouts, self.batch = TicketQueue(redis, "demo"), rollouts, batch
        self.groups, self.step = [], 0
        self.pauses_at, self.resumed = pauses_at, asyncio.Event()

    async def train(self, max_steps):
        epoch = await begun(self.queue, 0, 0, 0, 0, [], 0)
        while self.step < max_steps:
            if self.step == self.pauses_at:
                await self.resumed.wait()
            entries = []
            while len(entries) < self.batch:
                entries += await self.queue.read(epoch, "t", self.batch - len(entries), 500)
            self.groups += [(self.step, Group.decode(e.payload)) for e in entries]
            self.step += 1
            for rollout in self.rollouts:
                rollout.serve(f"e{epoch:06d}-s{self.step:06d}")
            await self.queue.commit(epoch, self.step, [Finished(e.ticket, e.entry_id) for e in entries], 0)


@asynccontextmanager
async def system(folder, redis_url, rollouts, **sections):
    """Yields a client of the orchestrator and the environment service's episodes."""
    async with AsyncExitStack() as stack:
        settings = run_config(folder, **sections)
        env = await stack.enter_async_context(env_app.open_env(env_settings.from_config(settings)))
        env_url = await stack.enter_async_context(served(env.app))
        urls = [await stack.enter_async_context(served(rollout.app())) for rollout in rollouts]
        trainer_url = await stack.enter_async_context(served(records_app(folder / "demo")))
        services = {**configured(redis_url, folder), "env": {"port": 1, "url": env_url}, "rollout_urls": urls}
        services |= {"trainer": {"url": trainer_url}}
        service = await stack.enter_async_context(
            open_orchestrator(from_config(run_config(folder, services=services, **sections)))
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        workers = [tasks.create_task(worker()) for worker in service.workers]
        client = httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://orchestrator")
        await stack.enter_async_context(client)
        try:
            yield client, env.app.state.env.episodes
        finally:
            for worker in workers:
                worker.cancel()


async def until(client, state, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while (found := (await client.get("/runs/demo")).json())["state"] != state:
            assert found["state"] != "failed", found["reason"]
            await asyncio.sleep(0.05)
    return found


def evals(folder):
    return [orjson.loads(line) for line in (folder / "demo" / "evals.jsonl").read_text(encoding="utf-8").splitlines()]


async def test_a_run_from_start_to_finish(tmp_path, redis, redis_url):
    rollouts = [RolloutDouble(), RolloutDouble()]
    trainer = TrainerClient(redis, rollouts)
    async with system(tmp_path, redis_url, rollouts) as (client, episodes):
        assert (await until(client, "waiting"))["reason"]
        await trainer.train(4)
        run = await until(client, "finished")
        assert len(episodes) == 0
    assert sorted(g.ticket for _, g in trainer.groups) == list(range(1, 9))
    assert all(len(g.trajectories) == 3 for _, g in trainer.groups)
    # A group is made for the step of its ticket's number; this trainer takes groups as they arrive, and drops none.
    assert all((g.ticket - 1) // trainer.batch - g.oldest().step <= 1 for _, g in trainer.groups)
    measured = [e["step"] for e in evals(tmp_path)]
    assert measured in ([0, 2, 4], [0, 3, 4], [0, 4])  # this trainer may be past a step before anybody looked
    assert all((e["n_tasks"], e["failed"]) == (12, 0) for e in evals(tmp_path))
    assert [(e["version_min"], e["version_max"]) for e in evals(tmp_path) if e["step"] in (0, 4)] == [
        ("e000001-s000000",) * 2,
        ("e000001-s000004",) * 2,
    ]
    assert all(rollout.engine.n_requests for rollout in rollouts)
    assert (run["step"], run["groups_published"], run["episodes_running"]) == (4, 8, 0)
    assert {server["version"] for server in run["servers"]} == {"e000001-s000004"}


async def test_a_synchronous_run_repeats_itself_through_failures(tmp_path, redis, redis_url):
    async def tokens(folder, rollouts, disturb):
        await redis.flushall()
        trainer = TrainerClient(redis, rollouts)
        async with (
            system(folder, redis_url, rollouts, grpo_config={"off_policy_steps": 0}) as (client, _),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(trainer.train(4))
            if disturb:
                tasks.create_task(flicker(rollouts[0]))
            await until(client, "finished")
        return {g.ticket: [t.token_ids.tolist() for t in g.trajectories] for _, g in trainer.groups}, trainer

    async def flicker(rollout):
        for _ in range(3):
            await asyncio.sleep(0.1)
            rollout.silence(60)
            await asyncio.sleep(0.3)
            rollout.silence(0)

    calm, _ = await tokens(tmp_path / "a", [RolloutDouble()], disturb=False)
    rough, trainer = await tokens(tmp_path / "b", [RolloutDouble(delay_s=0.01), RolloutDouble()], disturb=True)
    assert rough == calm
    assert all(step == g.oldest().step for step, g in trainer.groups)


async def test_pause_and_resume(tmp_path, redis, redis_url):
    rollouts = [RolloutDouble(delay_s=0.01)]
    trainer = TrainerClient(redis, rollouts)
    async with system(tmp_path, redis_url, rollouts) as (client, _), asyncio.TaskGroup() as tasks:
        assert (await client.post("/runs/demo/pause")).json()["state"] in ("paused", "waiting")
        training = tasks.create_task(trainer.train(4))
        await until(client, "paused")
        await asyncio.sleep(0.5)
        assert not trainer.groups
        await client.post("/runs/demo/resume")
        await training
        await until(client, "finished")
        assert (await client.post("/runs/demo/pause")).status_code == 409


async def test_a_mixture_changes_while_the_run_goes_on_and_no_ticket_its_task(tmp_path, redis, redis_url):
    async def play(folder, patch):
        await redis.flushall()
        rollouts = [RolloutDouble(delay_s=0.01)]
        trainer = TrainerClient(redis, rollouts, pauses_at=1)
        async with (
            system(folder, redis_url, rollouts, data={"mixture": {"frozen_lake": 2, "sokoban": 1}}) as (client, _),
            asyncio.TaskGroup() as tasks,
        ):
            training = tasks.create_task(trainer.train(4))
            async with asyncio.timeout(60):
                while trainer.step < 1:
                    await asyncio.sleep(0.01)
            if patch:
                answer = await client.patch("/runs/demo", json={"mixture": {"sokoban": 0}})
                assert (answer.status_code, answer.json()["name"]) == (200, "demo")
                again = await client.patch("/runs/demo", json={"mixture": {"sokoban": 0}})
                assert again.json()["mixture"] == answer.json()["mixture"]
            trainer.resumed.set()
            await training
            run = await until(client, "finished")
            assert (await client.patch("/runs/demo", json={"mixture": {"sokoban": 1}})).status_code == 409
        return {g.ticket: (g.env, g.task) for _, g in trainer.groups}, {row["env"]: row for row in run["mixture"]}

    calm, rows = await play(tmp_path / "a", patch=False)
    assert [env for env, _ in calm.values()].count("sokoban") in (2, 3)
    assert (rows["frozen_lake"]["groups"] + rows["sokoban"]["groups"], rows["sokoban"]["share"]) == (8, 0.333333)
    assert not (tmp_path / "a" / "demo" / "mixture.jsonl").exists()
    changed, rows = await play(tmp_path / "b", patch=True)
    (line,) = (
        orjson.loads(text)
        for text in (tmp_path / "b" / "demo" / "mixture.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert rows["sokoban"]["state"] == "removed"
    assert line["from_ticket"] <= 7  # at step 1, six tickets may be in hand
    assert all(changed[t] == calm[t] for t in range(1, line["from_ticket"]))
    assert all(changed[t][0] == "frozen_lake" for t in range(line["from_ticket"], 9))


async def test_what_is_wrong_with_a_change_of_the_mixture_is_told(tmp_path, redis, redis_url):
    async with system(tmp_path, redis_url, []) as (client, _):
        await begun(TicketQueue(redis, "demo"), 0, 0, 0, 0, [], 0)
        async with asyncio.timeout(60):
            while (await client.patch("/runs/demo", json={"mixture": {"frozen_lake": 1}})).status_code == 503:
                await asyncio.sleep(0.05)
        for body, status, told in (
            ({"mixture": {"chess": 1}}, 422, "frozen_lake"),
            ({"mixture": {"frozen_lake": 0}}, 422, "nothing would be left"),
            ({"mixture": {"frozen_lake": -1}}, 422, "mixture.frozen_lake"),
            ({"mixture": {"frozen_lake": "1"}}, 422, "mixture.frozen_lake"),
            ({"mixture": {}}, 422, "mixture"),
            ({}, 422, "mixture is missing"),
            ({"mixture": {"frozen_lake": 1}, "steps": 3}, 422, "steps"),
            ([], 400, "object"),
        ):
            answer = await client.patch("/runs/demo", json=body)
            assert (answer.status_code, told in answer.text) == (status, True), answer.text
        assert (await client.patch("/runs/other", json={"mixture": {"frozen_lake": 1}})).status_code == 404


async def test_what_is_missing_is_named(tmp_path, redis, redis_url):
    async with system(tmp_path, redis_url, []) as (client, _):
        assert (await client.get("/runs/other")).status_code == 404
        waiting = ("waiting", "the trainer has not opened the queue")
        async with asyncio.timeout(60):
            while [(run["state"], run["reason"]) for run in (await client.get("/runs")).json()] != [waiting]:
                await asyncio.sleep(0.05)
        await begun(TicketQueue(redis, "demo"), 0, 0, 0, 0, [], 0)
        async with asyncio.timeout(60):
            wait = re.compile(r"orchestrator waits for a rollout server .* none is known\), to evaluate step 0")
            while not any(map(wait.fullmatch, (run := (await client.get("/runs/demo")).json())["chain"])):
                await asyncio.sleep(0.05)
        assert run["reason"] == "no rollout server is known"
        assert run["quiet_s"] >= 0


async def test_an_unknown_environment_fails_the_run_with_its_name(tmp_path, redis, redis_url):
    rollouts = [RolloutDouble()]
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(env_app.open_env(env_settings.from_config(run_config(tmp_path))))
        env_url = await stack.enter_async_context(served(env.app))
        services = {**configured(redis_url, tmp_path), "env": {"port": 1, "url": env_url}}
        settings = run_config(tmp_path, data={"env": "chess"}, services=services)
        service = await stack.enter_async_context(open_orchestrator(from_config(settings)))
        await service.workers[1]()
        run = service.app.state.orchestrator.describe()
    assert rollouts
    assert run["state"] == "failed"
    assert "chess" in run["reason"]


def test_a_missing_redis_url_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"services\.redis_url"):
        from_config(run_config(tmp_path))
