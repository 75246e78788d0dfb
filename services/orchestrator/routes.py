"""HTTP to the orchestrator: runs, and pausing them. One process serves one run."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.orchestrator.orchestrator import Orchestrator
from shared.errors import Conflict, NotFound
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import Declared
from shared.web.routing import Router

router = Router(prefix="/runs", tag="runs")
ROLES = {
    "GET /runs": Role.VIEWER,
    "GET /runs/{name}": Role.VIEWER,
    "POST /runs/{name}/pause": Role.ADMIN,
    "POST /runs/{name}/resume": Role.ADMIN,
}
_RUN = {"type": "object"}


def _named(request: Request, name: str) -> Orchestrator:
    """Raises NotFound for a run that another process serves."""
    orchestrator: Orchestrator = request.app.state.orchestrator
    if name != orchestrator.settings.run:
        raise NotFound(f"there is no run {name!r} here", f"this orchestrator serves {orchestrator.settings.run!r}")
    return orchestrator


@router.get("", Declared(answer={"type": "array", "items": _RUN}))
async def list_runs(request: Request) -> Response:
    return respond(request, [request.app.state.orchestrator.describe()])


@router.get("/{name}", Declared(answer=_RUN))
async def show_run(request: Request, name: str) -> Response:
    """State (waiting, running, evaluating, paused, finished, failed) with its reason, progress, rates, servers,
    evaluations.
    """
    return respond(request, _named(request, name).describe())


@router.post("/{name}/pause", Declared(answer=_RUN))
async def pause_run(request: Request, name: str) -> Response:
    """No new groups are begun; those in progress are finished. Repeating it changes nothing."""
    orchestrator = _named(request, name)
    _require_going(orchestrator)
    orchestrator.pause()
    return respond(request, orchestrator.describe())


@router.post("/{name}/resume", Declared(answer=_RUN))
async def resume_run(request: Request, name: str) -> Response:
    orchestrator = _named(request, name)
    _require_going(orchestrator)
    orchestrator.resume()
    return respond(request, orchestrator.describe())


def _require_going(orchestrator: Orchestrator) -> None:
    if orchestrator.status.is_over:
        state, _ = orchestrator.status.state(None)
        raise Conflict(f"run {orchestrator.settings.run!r} has {state}")
