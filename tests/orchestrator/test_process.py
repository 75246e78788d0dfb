"""The orchestrator as a process: SIGTERM ends it with code 0, and leaves no episode and no leased ticket behind."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import yaml

from services.env import app as env_app
from services.env import settings as env_settings
from shared import config
from shared.process.ports import free_port
from shared.queue.queue import TicketQueue
from tests.orchestrator.test_component import run_config
from tests.support.asgi import served
from tests.support.engine import RolloutDouble
from tests.support.records import records_app
from tests.support.redis import begun, configured


async def leased_by_clock(redis):
    """Leases that somebody holds; a score below the year 2001 is a ticket in the pool."""
    return await redis.zcount("{demo}:lease", 1e12, "+inf")


async def test_sigterm_gives_back_tickets_and_deletes_episodes(tmp_path, redis, redis_url):
    slow = RolloutDouble()
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(env_app.open_env(env_settings.from_config(run_config(tmp_path))))
        env_url = await stack.enter_async_context(served(env.app))
        rollout_url = await stack.enter_async_context(served(slow.app()))
        trainer_url = await stack.enter_async_context(served(records_app(tmp_path / "demo")))
        services = {
            **configured(redis_url, tmp_path),
            "env": {"port": 1, "url": env_url},
            "rollout_urls": [rollout_url],
            "orchestrator": {"port": free_port()},
            "trainer": {"url": trainer_url},
        }
        file = tmp_path / "run.yaml"
        file.write_text(
            yaml.safe_dump(run_config(tmp_path, services=services).model_dump(mode="json", exclude_unset=True)),
            encoding="utf-8",
        )
        assert config.load([file])
        queue, episodes = TicketQueue(redis, "demo"), env.app.state.env.episodes
        await begun(queue, 0, 0, 0, 0, [], 0)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.orchestrator", "--config", str(file)
        )
        try:
            async with asyncio.timeout(60):
                while not (tmp_path / "demo" / "evals.jsonl").exists():
                    await asyncio.sleep(0.02)
                slow.engine.delay_s = 60
                while len(episodes) < 3 and (await queue.state()).issued < 4:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
        assert len(episodes) == 0
        assert await leased_by_clock(redis) == 0
