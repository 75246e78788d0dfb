"""Put the recorder together."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi import FastAPI

from services.orchestrator.agents import RecorderContext, RenewTicket
from services.orchestrator.episodes.environments import EnvironmentCalls
from services.orchestrator.episodes.turn import TurnSampler
from shared.errors import QueueUnavailable
from shared.run.folder import RunFolder
from volley_agents.sessions import routes
from volley_agents.sessions.agents import SessionAgents
from volley_agents.sessions.calls import CallSampler
from volley_agents.sessions.routes import SessionsState
from volley_agents.sessions.sessions import Sessions
from volley_agents.sessions.settlement import SessionSettlement


class SessionRecorder:
    """Implements `AgentRecorder`: each episode of an agent is a session, which its calls name by a key."""

    router, roles = routes.router, routes.ROLES

    def __init__(self, context: RecorderContext) -> None:
        settings, tokenizer, status = context.settings, context.tokenizer, context.status
        bounds, url, model = settings.bounds, settings.agents_url, settings.model_name
        sampler = TurnSampler(context.balancer, status, tokenizer.end_ids, bounds)
        calls = EnvironmentCalls(context.environments, status)
        self._sessions = Sessions(RunFolder(settings.folder).sessions, bounds.timeout_s, bounds.max_turns)
        self.agents = SessionAgents(self._sessions, context.environments, calls, sampler, url, model)
        answering = CallSampler(tokenizer, sampler, bounds, status, model)
        self._state = SessionsState(self._sessions, answering, url)
        self._state.environments = context.environments_played
        self._settlement = SessionSettlement(self._sessions, context.trainer, calls, context.last_evaluated)
        self.workers = (self._sessions.work, self._settlement.watch)

    def attach(self, app: FastAPI) -> None:
        app.state.sessions = self._state

    def describe(self) -> dict[str, Any]:
        return self._sessions.describe()

    async def give_back(self, queue: RenewTicket) -> None:
        for ticket in sorted(await self._sessions.open_tickets() - {0}):
            with suppress(QueueUnavailable):
                await queue.renew(ticket, 0)

    async def follow(self, run_id: str) -> None:
        await self._sessions.follow(run_id)

    async def settle(self) -> None:
        if self._sessions.tickets():
            await self._settlement.settle()
