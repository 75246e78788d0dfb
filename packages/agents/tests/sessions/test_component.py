"""The whole way: programs in sandboxes of the real environment service call the recorder of a real run over HTTP."""

import textwrap
from contextlib import AsyncExitStack

import httpx
import orjson
import pytest

from packages.agents.tests.sessions.sandboxed import serve_agent
from services.orchestrator.app import open_orchestrator
from services.orchestrator.settings import from_config
from shared.process.ports import free_port
from shared.run import ledger
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.orchestrator.test_component import TrainerClient, run_config, until
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.records import records_app
from tests.support.redis import configured, redis, redis_server, redis_url  # noqa: F401
from tests.support.sandboxes import why_no_programs

AGENT = textwrap.dedent("""
    import json, os, urllib.request

    class Agent:
        splits = {"train": 100, "eval": 10}
        timeout_s = 120

        def reset(self, split, index, seed):
            self.index = index
            return f"say {split} {index}"

        def run(self, base_url, api_key, model):
            def ask(*messages, **more):
                body = json.dumps({"model": model, "messages": messages, **more}).encode()
                headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
                request = urllib.request.Request(base_url + "/chat/completions", body, headers)
                return json.loads(urllib.request.urlopen(request, timeout=110).read())["choices"][0]["message"]

            said = {"role": "user", "content": os.environ["VOLLEY_TASK"]}
            first = ask(said)
            ask(said, first, {"role": "user", "content": "go on"})
            ask({"role": "system", "content": "you are a sub-agent"}, said, max_tokens=4)
            return first["content"]

        def judge(self, output):
            return float(self.index % 2), {"success": bool(self.index % 2)}
""")


async def test_a_run_of_programs_from_start_to_finish(tmp_path, redis, redis_url):  # noqa: F811
    if reason := await why_no_programs():
        pytest.skip(reason)
    rollouts, port = [RolloutDouble()], free_port()
    trainer = TrainerClient(redis, rollouts)
    sections = {"data": {"env": "agent", "n_eval_tasks": 2}, "trainer": {"max_steps": 2, "groups_per_step": 2}}
    sections["orchestrator"] = {"episode_timeout_s": 120}
    async with AsyncExitStack() as stack:
        agents = await serve_agent(stack, tmp_path, AGENT)
        services = {**configured(redis_url, tmp_path), "env": {"port": 1, "url": agents.url}}
        services |= {"rollout_urls": [await stack.enter_async_context(served(one.app())) for one in rollouts]}
        services |= {"trainer": {"url": await stack.enter_async_context(served(records_app(tmp_path / "demo")))}}
        services |= {"orchestrator": {"port": port}}
        settings = from_config(run_config(tmp_path, services=services, **sections))
        service = await stack.enter_async_context(open_orchestrator(settings))
        url = await stack.enter_async_context(served(service.app, port=port))
        workers = agents.workers + [agents.tasks.create_task(worker()) for worker in service.workers]
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        await trainer.train(2)
        trained = [ledger.line(ticket, ledger.TRAINED, WeightVersion(1, 1)) for ticket in range(1, 5)]
        RunFolder(tmp_path / "demo").ledger.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in trained))
        run = await until(client, "finished", 120.0)
        assert len(agents.service.app.state.env.episodes) == 0
        for worker in workers:
            worker.cancel()
    trajectories = [t for _, group in trainer.groups for t in group.trajectories]
    assert len(trajectories) == 12
    for trajectory in trajectories:
        assert len(trajectory.branches) == 1
        assert trajectory.branches[0].parent == -1
        assert sum(turn.role == "assistant" for turn in trajectory.turns) == 2
        assert trajectory.failures == {}
    assert {e["failed"] for e in run["evaluations"]} == {0}
    assert run["sessions"] == {"trained": 12, "void": 2 * len(run["evaluations"])}
