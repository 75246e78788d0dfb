"""HTTP to the conductor: runs, and pausing them. One process serves one run."""

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


async def _conductor(request: Request) -> Orchestrator:
    return request.app.state.conductor


Served = Annotated[Orchestrator, Depends(_conductor)]


async def _named(conductor: Served, name: str) -> Orchestrator:
    if name != conductor.settings.run:
        raise NotFound(f"there is no run {name!r} here", f"this orchestrator serves {conductor.settings.run!r}")
    return conductor


Named = Annotated[Orchestrator, Depends(_named)]


@router.get("")
async def list_runs(conductor: Served) -> list[dict[str, Any]]:
    return [conductor.describe()]


@router.get("/{name}")
async def show_run(conductor: Named) -> dict[str, Any]:
    """State (waiting, running, evaluating, paused, finished, failed) with its reason, progress, rates, servers,
    evaluations.
    """
    return conductor.describe()


@router.post("/{name}/pause")
async def pause_run(conductor: Named) -> dict[str, Any]:
    """No new groups are begun; those in progress are finished. Repeating it changes nothing."""
    _require_going(conductor)
    conductor.pause()
    return conductor.describe()


@router.post("/{name}/resume")
async def resume_run(conductor: Named) -> dict[str, Any]:
    _require_going(conductor)
    conductor.resume()
    return conductor.describe()


def _require_going(conductor: Orchestrator) -> None:
    if conductor.board.is_over:
        state, _ = conductor.board.state(None)
        raise Conflict(f"run {conductor.settings.run!r} has {state}")
