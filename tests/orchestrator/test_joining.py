"""Environments that join a live run, break and come back, through the real services: a list of rows as an environment
service with submissions gives it, in front of the real one.
"""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import orjson
import pytest
from fastapi import FastAPI

from services.env import app as env_app
from services.env import settings as env_settings
from services.orchestrator.app import open_orchestrator
from services.orchestrator.mixture import suspension
from services.orchestrator.settings import from_config
from shared import codec
from tests.orchestrator.test_component import TrainerClient, evals, run_config
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.records import records_app
from tests.support.redis import configured


@dataclass
class Submissions:
    """An ASGI application around another one: the rows of `GET /environments` say what `states` says, and episodes of
    what is in `broken` cannot be made.
    """

    app: FastAPI
    states: dict[str, dict[str, object]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    @property
    def state(self):
        return self.app.state

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/environments":
            await self._listed(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/episodes" and self.broken:
            message = await receive()
            env = codec.unpack(message["body"], "body", 100)["env"]
            if env in self.broken:
                problem = {"type": "urn:volley:Unavailable", "title": "x", "status": 503, "detail": f"{env} is gone"}
                await answer(send, 503, orjson.dumps(problem), b"application/problem+json")
                return
            messages = iter([message])

            async def again():
                return next(messages, None) or await receive()

            await self.app(scope, again, send)
        else:
            await self.app(scope, receive, send)

    async def _listed(self, scope, receive, send):
        body = b""

        async def keep(message):
            nonlocal body
            body += message.get("body", b"")

        await self.app(scope, receive, keep)
        rows = [row | self.states.get(row["name"], {"state": "built-in"}) for row in orjson.loads(body)["environments"]]
        await answer(send, 200, orjson.dumps({"environments": rows}), b"application/json")


async def answer(send, status, body, media_type):
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def live_run(folder, redis_url, rollouts):
    """Yields a client of the orchestrator, and the submissions of the environment service; `adder` is there already, as
    a variant, and has no weight.
    """
    sections = {
        "data": {"n_eval_tasks": 4},
        "trainer": {"max_steps": 10**6, "groups_per_step": 2},
        "orchestrator": {"max_attempts": 1, "eval_every_n_steps": 8},
    }
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(
            env_app.open_env(env_settings.from_config(run_config(folder, **sections)))
        )
        variant = {"name": "adder", "base": "frozen_lake", "config": {"size": 3, "eval_tasks": 5}}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(env.app), base_url="http://env") as client:
            assert (await client.post("/environments", json=variant)).status_code == 201
        submissions = Submissions(env.app)
        env_url = await stack.enter_async_context(served(submissions))
        urls = [await stack.enter_async_context(served(rollout.app())) for rollout in rollouts]
        trainer_url = await stack.enter_async_context(served(records_app(folder / "demo")))
        services = {**configured(redis_url, folder), "env": {"port": 1, "url": env_url}, "rollout_urls": urls}
        services |= {"trainer": {"url": trainer_url}}
        settings = from_config(run_config(folder, services=services, **sections))
        service = await stack.enter_async_context(open_orchestrator(settings))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        workers = [tasks.create_task(worker()) for worker in service.workers]
        client = httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://orchestrator")
        await stack.enter_async_context(client)
        try:
            yield client, submissions
        finally:
            for worker in workers:
                worker.cancel()


async def until(client, holds):
    end = time.monotonic() + 120
    while True:
        run = (await client.get("/runs/demo")).json()
        assert run["state"] != "failed", run["reason"]
        if holds({row["env"]: row for row in run["mixture"]}, run):
            return run
        assert time.monotonic() < end, run
        await asyncio.sleep(0.1)


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(suspension, "_FIRST_S", 0.2)
    monkeypatch.setattr(suspension, "_LONGEST_S", 1.0)


async def test_what_is_submitted_joins_is_trained_on_breaks_and_comes_back_and_the_run_goes_on(
    tmp_path, redis, redis_url, hurried
):
    rollouts = [RolloutDouble(delay_s=0.005)]
    trainer = TrainerClient(redis, rollouts)
    async with (
        live_run(tmp_path, redis_url, rollouts) as (client, submissions),
        asyncio.TaskGroup() as tasks,
    ):
        training = tasks.create_task(trainer.train(10**6))
        await until(client, lambda rows, run: run["groups_published"] > 3)
        submissions.states["adder"] = {"state": "canary", "weight": 1}
        await until(client, lambda rows, _: rows.get("adder", {}).get("groups", 0) >= 1)
        submissions.states["adder"] = {"state": "active", "weight": 1}
        await until(client, lambda rows, _: rows["adder"]["share"] == 0.5 and rows["adder"]["groups"] >= 4)
        submissions.broken.add("adder")
        run = await until(client, lambda rows, _: rows["adder"]["state"] == "suspended")
        reason = next(row["reason"] for row in run["mixture"] if row["env"] == "adder")
        assert "groups in a row failed, the last with Unavailable: adder is gone" in reason
        before = run["groups_published"]
        await until(client, lambda rows, run: run["groups_published"] > before + 10)
        submissions.broken.clear()
        n = next(row["groups"] for row in run["mixture"] if row["env"] == "adder")
        await until(client, lambda rows, _: rows["adder"]["state"] == "active" and rows["adder"]["groups"] >= n + 3)
        submissions.states["adder"] = {"state": "retired", "weight": 1}
        await until(client, lambda rows, _: (rows["adder"]["state"], rows["adder"]["share"]) == ("left", 0))
        training.cancel()
    envs = {g.env for _, g in trainer.groups}
    assert envs == {"frozen_lake", "adder"}
    whys = [
        orjson.loads(line)["why"]
        for line in (tmp_path / "demo" / "mixture.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert whys[:2] == ["adder joined", "the shares changed"]
    assert any("is back" in why for why in whys)
    assert whys[-1] == "adder left"
    measured = [(one.get("env"), one["n_tasks"]) for one in evals(tmp_path)]
    assert {("adder", 4), (None, 4)} == set(measured)
