"""HTTP routes of the orchestrator: runs, and pausing them. One process serves one run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator.orchestrator import Orchestrator
from shared.data_schema import MOST_ENVIRONMENTS, Weight
from shared.errors import Conflict, NotFound, Unavailable
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares

router = APIRouter(prefix="/runs", tags=["runs"])
ROLES = {
    "GET /runs": Role.VIEWER,
    "GET /runs/{name}": Role.VIEWER,
    "PATCH /runs/{name}": Role.ADMIN,
    "POST /runs/{name}/pause": Role.ADMIN,
    "POST /runs/{name}/resume": Role.ADMIN,
}


class MixtureBody(BaseModel):
    """Weights by name without version."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"mixture": {"frozen_lake": 3, "adder": 1}}]}
    )
    mixture: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=200)], Weight],
        Field(min_length=1, max_length=MOST_ENVIRONMENTS),
    ]


async def _orchestrator(request: Request) -> Orchestrator:
    return request.app.state.orchestrator


Served = Annotated[Orchestrator, Depends(_orchestrator)]


async def _named(orchestrator: Served, name: str) -> Orchestrator:
    if name != orchestrator.settings.run:
        raise NotFound(f"there is no run {name!r} here", f"this orchestrator serves {orchestrator.settings.run!r}")
    return orchestrator


Named = Annotated[Orchestrator, Depends(_named)]


@router.get("")
async def list_runs(orchestrator: Served) -> list[dict[str, Any]]:
    return [orchestrator.describe()]


@router.get("/{name}")
async def show_run(orchestrator: Named) -> dict[str, Any]:
    """State (waiting, running, evaluating, paused, finished, failed) with its reason, progress, rates, servers,
    evaluations.
    """
    return orchestrator.describe()


@router.patch("/{name}", openapi_extra=declares(body=MixtureBody, answer={"type": "object"}))
async def change_run(request: Request, orchestrator: Named) -> Response:
    """Change weights of the run's mixture from the next ticket on; 0 removes an environment.

    Other environments keep their weights. Repeating it changes nothing.
    """
    _require_going(orchestrator)
    body = await read_model(request, MixtureBody)
    if orchestrator.mixture is None:
        raise Unavailable("the environment service has not answered yet", "try again")
    await orchestrator.mixture.choose(body.mixture)
    return respond(request, orchestrator.describe())


@router.post("/{name}/pause")
async def pause_run(orchestrator: Named) -> dict[str, Any]:
    """Start no new groups, and finish those in progress. Repeating it changes nothing."""
    _require_going(orchestrator)
    orchestrator.pause()
    return orchestrator.describe()


@router.post("/{name}/resume")
async def resume_run(orchestrator: Named) -> dict[str, Any]:
    _require_going(orchestrator)
    orchestrator.resume()
    return orchestrator.describe()


def _require_going(orchestrator: Orchestrator) -> None:
    if orchestrator.status.is_over:
        state, _ = orchestrator.status.state(None)
        raise Conflict(f"run {orchestrator.settings.run!r} has {state}")
