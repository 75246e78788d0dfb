"""HTTP to the orchestrator: runs, and pausing them. One process serves one run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from services.orchestrator.orchestrator import Orchestrator
from shared.errors import Conflict, NotFound
from shared.web.access import Role

router = APIRouter(prefix="/runs", tags=["runs"])
ROLES = {
    "GET /runs": Role.VIEWER,
    "GET /runs/{name}": Role.VIEWER,
    "POST /runs/{name}/pause": Role.ADMIN,
    "POST /runs/{name}/resume": Role.ADMIN,
}


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


@router.post("/{name}/pause")
async def pause_run(orchestrator: Named) -> dict[str, Any]:
    """No new groups are begun; those in progress are finished. Repeating it changes nothing."""
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
