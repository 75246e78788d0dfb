"""The real environment service with a submitted agent, whose programs run in sandboxes."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.env import app as env_app
from services.env import settings as env_settings
from shared.boot import RunningService
from tests.orchestrator.test_component import run_config
from tests.support.asgi import served
from tests.support.submitted import decided, submit


@dataclass
class AgentService:
    """The service at `url`, the group of its tasks, and its workers, which the test cancels."""

    service: RunningService
    url: str
    tasks: asyncio.TaskGroup
    workers: list[asyncio.Task[None]]


async def serve_agent(stack: AsyncExitStack, folder: Path, agent: str) -> AgentService:
    """Start the service within `stack`, and submit the agent under the name `agent`."""
    env = await stack.enter_async_context(env_app.open_env(env_settings.from_config(run_config(folder))))
    url = await stack.enter_async_context(served(env.app))
    tasks = await stack.enter_async_context(asyncio.TaskGroup())
    workers = [tasks.create_task(worker()) for worker in env.workers]
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await submit(http, agent, name="agent")).status_code == 202
        row = await decided(http, "agent")
        assert row["state"] == "active", row["report"]
    return AgentService(env, url, tasks, workers)
