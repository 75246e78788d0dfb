"""The list of environments on offer."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.env.api.answers import EnvironmentList
from services.env.api.state import state_of
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import declares

router = APIRouter(tags=["environments"])
ROLES = {"GET /environments": Role.VIEWER}


@router.get("/environments", openapi_extra=declares(answer=EnvironmentList))
async def list_environments(request: Request) -> Response:
    """List all environments with their settings and states.

    Of each submitted environment the list has the versions in use or on the way there, and the newest of the others.
    `GET /environments/NAME` has every version.
    """
    state = state_of(request)
    extension, rewards = state.extension, state.extension.rewards
    entries = {entry.name: entry for entry in state.catalogue.entries()}
    rows = [entry.describe() for name, entry in entries.items() if name not in extension.names()]
    rows = [
        {
            **row,
            "trouble": state.trouble(row["name"]),
            "data": state.content.of(row["name"]),
            "rewards": None if rewards is None else rewards.describe(row["name"]),
        }
        for row in (*rows, *extension.rows())
    ]
    return respond(request, {"environments": rows, "installed": await asyncio.to_thread(extension.installed)})
