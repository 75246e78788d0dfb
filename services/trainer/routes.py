"""HTTP to the board: what the trainer does, and wishes that are met at the next boundary between steps."""

from __future__ import annotations

from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from services.trainer.status import Phase, TrainerStatus
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import Declared
from shared.web.routing import Router

router = Router(tag="trainer")
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


def _board(request: Request) -> TrainerStatus:
    return request.app.state.board


@router.get("/status", Declared(answer=_STATUS))
async def status(request: Request) -> Response:
    """Phase, step, versions, the last step's metrics, tickets by how they ended, and what is waited for."""
    return respond(request, _board(request).status())


@router.post("/checkpoint", Declared(answer=_ASKED, statuses=(202,)))
async def checkpoint(request: Request) -> Response:
    """Asks for a checkpoint after the running step; `durable_step` in /status tells when it is there."""
    board = _board(request)
    board.ask(checkpoint=True)
    return respond(request, {"step": board.step, "durable_step": board.durable_step}, 202)


@router.post("/pause", Declared(answer=_ASKED))
async def pause(request: Request) -> Response:
    """No new step starts until /resume; the running one ends."""
    board = _board(request)
    board.ask(pause=True)
    return respond(request, {"paused": True, "step": board.step})


@router.post("/resume", Declared(answer=_ASKED))
async def resume(request: Request) -> Response:
    board = _board(request)
    board.ask(pause=False)
    return respond(request, {"paused": False, "step": board.step})
