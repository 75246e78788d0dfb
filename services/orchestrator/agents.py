"""Interface of the agent recorder, which a package provides (group `volley.agents`); at most one is installed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, FastAPI

from services.orchestrator.episodes.runner import Agents
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.status import RunStatus
from shared import packages
from shared.clients.env import EnvClient
from shared.clients.trainer import TrainerClient
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.web.access import Role


class RenewTicket(Protocol):
    """Queue methods that a recorder uses."""

    async def renew(self, ticket: int, ttl_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecorderContext:
    """Parts of the orchestrator that a recorder uses.

    `environments_played` are the names of the run's environments, none before they are known; `last_evaluated` is the
    last step whose evaluation is complete.
    """

    settings: OrchestratorSettings
    tokenizer: ChatTokenizer
    environments: EnvClient
    balancer: Balancer
    status: RunStatus
    trainer: TrainerClient
    environments_played: Callable[[], Collection[str]]
    last_evaluated: Callable[[], int | None]


class AgentRecorder(Protocol):
    """Serves the models' APIs to agents, and records their calls as episodes.

    `agents` plays the episodes of agents' environments; `workers` run as long as the service.
    """

    agents: Agents
    router: APIRouter
    roles: dict[str, Role]
    workers: Sequence[Callable[[], Awaitable[None]]]

    def attach(self, app: FastAPI) -> None:
        """Give the routes their state."""
        ...

    def describe(self) -> Mapping[str, int]: ...

    async def give_back(self, queue: RenewTicket) -> None:
        """Give back the tickets that an earlier process held for agents, which are waiting."""
        ...

    async def follow(self, run_id: str) -> None:
        """Set the run's id; sessions with another id are given up."""
        ...

    async def settle(self) -> None:
        """Settle the sessions of finished tickets. Raises VolleyError."""
        ...


def agent_recorder(context: RecorderContext) -> AgentRecorder | None:
    """Return the installed package's recorder; None without one. Raises ConfigError."""
    makers = packages.loaded(packages.AGENTS)
    if len(makers) > 1:
        raise ConfigError(f"several packages record agents: {', '.join(makers)}", "uninstall all but one")
    return next((make(context) for make in makers.values()), None)
