"""HTTP to the board: what the trainer does, and wishes that are met at the next boundary between steps."""

from __future__ import annotations

from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from services.trainer.status import Phase, TrainerStatus
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import declares

router = APIRouter(tags=["trainer"])
_STATUS = {
    "type": "object",
    "properties": {"run": {"type": "string"}, "phase": {"enum": list(get_args(Phase))}, "tickets": {"type": "object"}}
    | {name: {"type": "integer"} for name in ("step", "durable_step", "max_steps", "epoch")},
    "required": ["run", "phase", "step", "durable_step", "max_steps", "epoch", "tickets"],
}
_ASKED = {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}
ROLES = {
    "GET /status": Role.VIEWER,
    "POST /checkpoint": Role.ADMIN,
    "POST /pause": Role.ADMIN,
    "POST /resume": Role.ADMIN,
}


async def _board(request: Request) -> TrainerStatus:
    return request.app.state.board


Here = Annotated[TrainerStatus, Depends(_board)]


@router.get("/status", openapi_extra=declares(answer=_STATUS))
async def status(request: Request, board: Here) -> Response:
    """Phase, step, versions, the last step's metrics, tickets by how they ended, and what is waited for."""
    return respond(request, board.status())


@router.post("/checkpoint", status_code=202, openapi_extra=declares(answer=_ASKED, statuses=(202,)))
async def checkpoint(request: Request, board: Here) -> Response:
    """Asks for a checkpoint after the running step; `durable_step` in /status tells when it is there."""
    board.ask(checkpoint=True)
    return respond(request, {"step": board.step, "durable_step": board.durable_step}, 202)


@router.post("/pause", openapi_extra=declares(answer=_ASKED))
async def pause(request: Request, board: Here) -> Response:
    """No new step starts until /resume; the running one ends."""
    board.ask(pause=True)
    return respond(request, {"paused": True, "step": board.step})


@router.post("/resume", openapi_extra=declares(answer=_ASKED))
async def resume(request: Request, board: Here) -> Response:
    board.ask(pause=False)
    return respond(request, {"paused": False, "step": board.step})
