"""A recorder with a scripted engine behind it: its store, its application, and clients with the real SDK."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import openai
from fastapi import FastAPI

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.turn import TokenBounds, TurnSampler
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening
from shared.models.chat import ChatTokenizer
from shared.services_schema import Limits
from shared.web.http import create_app
from tests.orchestrator.fakes import BOUNDS, Say, ScriptedEngine, balancer_of, spec
from tests.support.tokenizer import tiny_tokenizer
from volley_agents.sessions import routes
from volley_agents.sessions.calls import CallSampler
from volley_agents.sessions.session import AgentSession, RunningSample
from volley_agents.sessions.sessions import Sessions

MODEL = "tiny"
TOKENIZER = tiny_tokenizer()
WIDE = replace(BOUNDS, context_length=2048, max_response_length=32, max_turns=64)


def said(text: str) -> Say:
    """The tokens of a text, with the end of a turn."""
    return Say([*TOKENIZER.encode(text), TOKENIZER.eos_id])


def opening(agent: str = "program", *, judged: bool = True) -> Opening:
    return Opening("e1", "train/3", [{"role": "user", "content": "play"}], agent=agent, judged=judged)


@dataclass
class Recorder:
    """`engine` answers; `sessions` are what a process has of the store in `folder`."""

    folder: Path
    engine: ScriptedEngine
    sessions: Sessions
    app: FastAPI
    balancer: Balancer
    budget: TokenBudget = field(default_factory=lambda: TokenBudget(3))

    async def begin(self, ticket: int = 1, agent: str = "program", *, judged: bool = True) -> AgentSession:
        session = await self.sessions.begin(spec(ticket), opening(agent, judged=judged), f"r{ticket}")
        await session.load()
        return session

    @asynccontextmanager
    async def playing(self, ticket: int = 1) -> AsyncIterator[AgentSession]:
        """A session that is played until the end of the context."""
        session = await self.sessions.at(spec(ticket)) or await self.begin(ticket)
        await session.load()
        with session.running(RunningSample(spec(ticket), self.budget)):
            yield session

    def http(self, key: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://recorder/v1", headers=headers)

    def client(self, session: AgentSession, **settings: object) -> openai.AsyncOpenAI:
        key = self.sessions.key_of(session)
        return openai.AsyncOpenAI(
            api_key=key, base_url="http://recorder/v1", http_client=self.http(), **{"max_retries": 0, **settings}
        )


@asynccontextmanager
async def recording(
    folder: Path,
    *script: Say,
    bounds: TokenBounds = WIDE,
    engine: ScriptedEngine | None = None,
    tokenizer: ChatTokenizer = TOKENIZER,
) -> AsyncIterator[Recorder]:
    engine = engine or ScriptedEngine(script=list(script))
    sessions, status = Sessions(folder / "sessions.sqlite3", bounds.timeout_s, bounds.max_turns), RunStatus()
    sampler = TurnSampler(balancer := balancer_of(engine), status, tokenizer.end_ids, bounds)
    calls = CallSampler(tokenizer, sampler, bounds, status, MODEL)
    app = create_app("orchestrator", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)
    app.state.sessions = routes.SessionsState(sessions, calls, "http://recorder/v1")
    app.include_router(routes.router)
    worker = asyncio.create_task(sessions.work())
    try:
        yield Recorder(folder, engine, sessions, app, balancer)
    finally:
        worker.cancel()
        await asyncio.wait([worker])
