"""HTTP to the run's folder, which is the trainer's alone: records that the orchestrator hands over.

Invariant: a line is in the folder once, however often it is handed over, and durable before the answer. So whoever
makes a record repeats it until it is answered, and a folder that both share holds it once as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import InputError
from shared.files import storage
from shared.run.folder import Record, RunFolder
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares

router = APIRouter(tags=["trainer"])
ROLES = {"POST /records/{record}": Role.SERVICE}
_ADDED = {"type": "object", "properties": {"added": {"type": "integer"}}, "required": ["added"]}


class LinesBody(BaseModel):
    """Lines of a record, each a JSON object, without their ends."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [{"lines": ['{"step": 0}']}]})
    lines: Annotated[list[str], Field(min_length=1, max_length=10_000)]


@dataclass(frozen=True, slots=True)
class RecordsState:
    """What the routes work on; lives in `app.state.records`."""

    folder: RunFolder
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _state(request: Request) -> RecordsState:
    return request.app.state.records


Here = Annotated[RecordsState, Depends(_state)]
Named = Annotated[Record, Path(openapi_examples={"evaluations": {"value": "evals"}})]


@router.post("/records/{record}", openapi_extra=declares(body=LinesBody, answer=_ADDED))
async def add(request: Request, record: Named, state: Here) -> Response:
    """Appends the lines that the run's folder does not have yet; they are durable when this is answered."""
    lines = [_line(text) for text in (await read_model(request, LinesBody)).lines]
    path = state.folder.handed_over[record]

    def append() -> int:
        known = set(storage.whole_lines(path))
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if new:  # never in a folder of both, where the orchestrator may be writing
            storage.blank_torn_line(path)
            storage.append(path, b"".join(line + b"\n" for line in new), durable=True)
        return len(new)

    async with state.alone:
        return respond(request, {"added": await asyncio.to_thread(append)})


def _line(text: str) -> bytes:
    """Raises InputError."""
    with contextlib.suppress(ValueError):
        line = text.encode()
        if b"\n" not in line and isinstance(orjson.loads(line), dict):
            return line
    raise InputError("a line is no JSON object", "send each line without its end")
