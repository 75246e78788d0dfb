"""The recorder under `kill -9`: programs go on, no session is lost, no call is answered twice differently."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import httpx
import pytest
import yaml

from packages.agents.tests.sessions.sandboxed import serve_agent
from shared.process.ports import free_port
from tests.orchestrator.test_component import TrainerClient, run_config
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.records import records_app
from tests.support.redis import configured, redis, redis_server, redis_url  # noqa: F401
from tests.support.sandboxes import why_no_programs

N_KILLS = 5
AGENT = """
import json, os, time, urllib.request

class Agent:
    splits = {"train": 100, "eval": 10}
    timeout_s = 120

    def reset(self, split, index, seed):
        self.index = index
        return f"say {split} {index}"

    def run(self, base_url, api_key, model):
        def ask(messages, key):
            body = json.dumps({"model": model, "messages": messages}).encode()
            headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json", "Idempotency-Key": key}
            request = urllib.request.Request(base_url + "/chat/completions", body, headers)
            return urllib.request.urlopen(request, timeout=110).read()

        messages = [{"role": "user", "content": os.environ["VOLLEY_TASK"]}]
        for turn in range(6):
            first = ask(messages, f"turn {turn}")
            time.sleep(0.2)
            if ask(messages, f"turn {turn}") != first:
                return f"turn {turn} was answered twice differently"
            messages += [json.loads(first)["choices"][0]["message"], {"role": "user", "content": "go on"}]
        return "done"

    def judge(self, output):
        return float(self.index % 2), {"success": output == "done"}
"""


async def started(file):
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "services.orchestrator", "--config", str(file))


@pytest.mark.long
async def test_programs_survive_kills_of_the_recorder(tmp_path, redis, redis_url):  # noqa: F811
    if reason := await why_no_programs():
        pytest.skip(reason)
    rollout, port = RolloutDouble(), free_port()
    rollout.engine.delay_s = 0.3
    trainer = TrainerClient(redis, [rollout])
    sections = {
        "data": {"env": "agent", "n_eval_tasks": 1},
        "trainer": {"max_steps": 3, "groups_per_step": 2},
        "orchestrator": {"max_concurrent_episodes": 6, "max_turns": 32, "lease_s": 30, "episode_timeout_s": 120},
        "rollout": {"engine": {"context_length": 1024}},
    }
    async with AsyncExitStack() as stack:
        agents = await serve_agent(stack, tmp_path, AGENT)
        services = {**configured(redis_url, tmp_path), "env": {"port": 1, "url": agents.url}}
        services |= {"rollout_urls": [await stack.enter_async_context(served(rollout.app()))]}
        services |= {"trainer": {"url": await stack.enter_async_context(served(records_app(tmp_path / "demo")))}}
        services |= {"orchestrator": {"port": port}}
        settings = run_config(tmp_path, services=services, **sections)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        process = await started(file)
        training = agents.tasks.create_task(trainer.train(3))
        try:
            for _ in range(N_KILLS):
                done, _ = await asyncio.wait([training], timeout=12.0)
                if done:
                    break
                process.send_signal(signal.SIGKILL)
                await process.wait()
                process = await started(file)
            await asyncio.wait_for(training, 240)
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}"))
            async with asyncio.timeout(60):
                while True:
                    try:
                        found = (await client.get("/runs/demo")).json()
                    except httpx.TransportError:
                        found = {}
                    if found.get("state") == "finished":
                        break
                    await asyncio.sleep(0.2)
        finally:
            process.kill()
            await process.wait()
            for worker in agents.workers:
                worker.cancel()
    trajectories = [t for _, group in trainer.groups for t in group.trajectories]
    assert len(trajectories) == 18
    for trajectory in trajectories:
        assert trajectory.success
        assert len(trajectory.branches) == 0
        assert trajectory.failures == {}
        assert sum(turn.role == "assistant" for turn in trajectory.turns) == 6
