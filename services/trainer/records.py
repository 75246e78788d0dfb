"""HTTP to the run's folder, which is the trainer's alone: records that the orchestrator hands over, and is given
back where its own are lost.

Invariant: a line is in the folder once, however often it is handed over, and durable before the answer. So whoever
makes a record repeats it until it is answered, and a folder that both share holds it once as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import ConfigError, InputError
from shared.files import storage
from shared.files.reading import MAX_RECORD_BYTES, ended_lines, open_file
from shared.run.folder import Record, RunFolder
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares

router = APIRouter(tags=["trainer"])
ROLES = {"POST /records/{record}": Role.SERVICE, "GET /records/{record}": Role.SERVICE}
_ADDED = {"type": "object", "properties": {"added": {"type": "integer"}}, "required": ["added"]}
_KEPT = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}}, "next": {"type": "integer"}},
    "required": ["lines", "next"],
}
_MOST_BYTES = 2**20
"""Of lines in one answer; a longer one comes alone."""
_MOST_LINES = 10_000


class LinesBody(BaseModel):
    """Lines of a record, each a JSON object, without their ends."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [{"lines": ['{"step": 0}']}]})
    lines: Annotated[list[str], Field(min_length=1, max_length=_MOST_LINES)]


@dataclass(frozen=True, slots=True)
class RecordsState:
    """What the routes work on; lives in `app.state.records`. `check_open` raises while the folder takes nothing."""

    folder: RunFolder
    check_open: Callable[[], None] = lambda: None
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _state(request: Request) -> RecordsState:
    return request.app.state.records


Here = Annotated[RecordsState, Depends(_state)]
Named = Annotated[Record, Path(openapi_examples={"evaluations": {"value": "evals"}})]
Offset = Annotated[int, Query(ge=0, le=MAX_RECORD_BYTES, openapi_examples={"from the start": {"value": 0}})]


@router.post("/records/{record}", openapi_extra=declares(body=LinesBody, answer=_ADDED))
async def add(request: Request, record: Named, state: Here) -> Response:
    """Appends the lines that the run's folder does not have yet; they are durable when this is answered."""
    lines = [_line(text) for text in (await read_model(request, LinesBody)).lines]
    path = state.folder.handed_over[record]
    state.check_open()

    def append() -> int:
        known = set(storage.whole_lines(path))
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if new:  # never in a folder of both, where the orchestrator may be writing
            storage.blank_torn_line(path)
            storage.append(path, b"".join(line + b"\n" for line in new), durable=True)
        return len(new)

    async with state.alone:
        return respond(request, {"added": await asyncio.to_thread(append)})


@router.get("/records/{record}", openapi_extra=declares(answer=_KEPT))
async def read(request: Request, record: Named, state: Here, offset: Offset = 0) -> Response:
    """Whole lines from a byte of the record on, without their ends; `next` is where to go on: `offset` at the end."""
    state.check_open()
    lines, after = await asyncio.to_thread(_lines, state.folder.handed_over[record], offset)
    return respond(request, {"lines": lines, "next": after})


def _lines(path: FilePath, offset: int) -> tuple[list[str], int]:
    found, n_bytes = list[str](), 0
    try:
        with open_file(path) as file:
            file.seek(offset)
            for size, line in ended_lines(file):
                if n_bytes and (n_bytes + size > _MOST_BYTES or len(found) == _MOST_LINES):
                    break
                n_bytes += size
                with contextlib.suppress(InputError, UnicodeDecodeError):
                    found.append(_line(line.decode()).decode())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}", "put the run's own file back") from error
    return found, offset + n_bytes


def _line(text: str) -> bytes:
    """Raises InputError."""
    with contextlib.suppress(ValueError):
        line = text.encode()
        if b"\n" not in line and isinstance(orjson.loads(line), dict):
            return line
    raise InputError("a line is no JSON object", "send each line without its end")
