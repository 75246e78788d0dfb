"""Put the recorder together."""

from __future__ import annotations

from dataclasses import dataclass

from services.orchestrator.episodes.environments import EnvironmentCalls
from services.orchestrator.episodes.turn import TurnSampler
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.sessions.agents import SessionAgents
from services.orchestrator.sessions.calls import CallSampler
from services.orchestrator.sessions.routes import SessionsState
from services.orchestrator.sessions.sessions import Sessions
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.status import RunStatus
from shared.clients.env import EnvClient
from shared.models.chat import ChatTokenizer
from shared.run.folder import RunFolder


@dataclass(frozen=True, slots=True)
class AgentDoor:
    """Parts of the recorder that others need: its sessions, its way of playing episodes, the state of its routes."""

    sessions: Sessions
    calls: EnvironmentCalls
    agents: SessionAgents
    state: SessionsState


def agent_door(
    settings: OrchestratorSettings,
    tokenizer: ChatTokenizer,
    environments: EnvClient,
    balancer: Balancer,
    status: RunStatus,
) -> AgentDoor:
    bounds, url, model = settings.bounds, settings.agents_url, settings.model_name
    sampler, calls = TurnSampler(balancer, status, tokenizer.end_ids, bounds), EnvironmentCalls(environments, status)
    sessions = Sessions(RunFolder(settings.folder).sessions, bounds.timeout_s, bounds.max_turns)
    agents = SessionAgents(sessions, environments, calls, sampler, url, model)
    answering = CallSampler(tokenizer, sampler, bounds, status, model)
    return AgentDoor(sessions, calls, agents, SessionsState(sessions, answering, tokenizer, url))
