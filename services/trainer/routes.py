"""HTTP routes of the trainer: its status, and requests that it meets between two steps."""

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
    | {name: {"type": "integer"} for name in ("step", "durable_step", "checkpoint_step", "max_steps", "epoch")},
    "required": ["run", "phase", "step", "durable_step", "checkpoint_step", "max_steps", "epoch", "tickets"],
}
_ASKED = {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}
ROLES = {
    "GET /status": Role.VIEWER,
    "POST /checkpoint": Role.ADMIN,
    "POST /pause": Role.ADMIN,
    "POST /resume": Role.ADMIN,
}


async def _trainer_status(request: Request) -> TrainerStatus:
    return request.app.state.status


Here = Annotated[TrainerStatus, Depends(_trainer_status)]


@router.get("/status", openapi_extra=declares(answer=_STATUS))
async def status(request: Request, trainer: Here) -> Response:
    """Phase, step, versions, the last step's metrics, tickets by disposition, and current waits."""
    return respond(request, trainer.to_json())


@router.post("/checkpoint", status_code=202, openapi_extra=declares(answer=_ASKED, statuses=(202,)))
async def checkpoint(request: Request, trainer: Here) -> Response:
    """Request a checkpoint after the running step; it is durable once `checkpoint_step` in /status reaches the step."""
    trainer.ask(checkpoint=True)
    return respond(request, {"step": trainer.step, "checkpoint_step": trainer.checkpoint_step}, 202)


@router.post("/pause", openapi_extra=declares(answer=_ASKED))
async def pause(request: Request, trainer: Here) -> Response:
    """Pause training after the running step, until /resume."""
    trainer.ask(pause=True)
    return respond(request, {"paused": True, "step": trainer.step})


@router.post("/resume", openapi_extra=declares(answer=_ASKED))
async def resume(request: Request, trainer: Here) -> Response:
    trainer.ask(pause=False)
    return respond(request, {"paused": False, "step": trainer.step})
