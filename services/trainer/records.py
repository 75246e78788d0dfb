"""HTTP routes for records in the run's folder, which only the trainer writes.

The orchestrator sends its records here, and reads them back if it lost its own copy. It also reads the ledger.

Invariant: a line is in the folder once, however often it is sent, and durable before the response. So the sender
retries until it gets a response, and a folder that both services share also holds each line once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from services.trainer.interfaces import RecordCheck
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
"""Bytes of lines in one response; a longer line is sent alone."""
_MOST_LINES = 10_000


class LinesBody(BaseModel):
    """Lines of a record, each a JSON object without its line ending."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [{"lines": ['{"step": 0}']}]})
    lines: Annotated[list[str], Field(min_length=1, max_length=_MOST_LINES)]


@dataclass(frozen=True, slots=True)
class RecordsState:
    """State of the routes, in `app.state.records`.

    `check_open` raises while the folder accepts no records. `checks` raise InputError for lines that are refused.
    """

    folder: RunFolder
    check_open: Callable[[], None] = lambda: None
    checks: Mapping[Record, RecordCheck] = field(default_factory=dict[Record, RecordCheck])
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _state(request: Request) -> RecordsState:
    return request.app.state.records


Here = Annotated[RecordsState, Depends(_state)]
Named = Annotated[Record, Path(openapi_examples={"samples": {"value": "samples"}})]
Readable = Annotated[Record | Literal["ledger"], Path(openapi_examples={"evaluations": {"value": "evals"}})]
Offset = Annotated[int, Query(ge=0, le=MAX_RECORD_BYTES, openapi_examples={"from the start": {"value": 0}})]


@router.post("/records/{record}", openapi_extra=declares(body=LinesBody, answer=_ADDED))
async def add(request: Request, record: Named, state: Here) -> Response:
    """Append the lines that the run's folder does not have yet; they are durable before the response.

    A line that the run cannot have is refused: an evaluation of a version that was never made, or a change of the
    mixture that contradicts the groups trained already.
    """
    lines = [_line(text) for text in (await read_model(request, LinesBody)).lines]
    path = state.folder.handed_over[record]
    state.check_open()

    def append() -> None:
        storage.blank_torn_line(path)
        storage.append(path, b"".join(line + b"\n" for line in new), durable=True)

    async with state.alone:
        there = list(await asyncio.to_thread(storage.whole_lines, path))
        known = set(there)
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if new and (check := state.checks.get(record)) is not None:
            await check(new, there)
        if new:  # never in a shared folder, where the orchestrator writes the lines itself
            await asyncio.to_thread(append)
        return respond(request, {"added": len(new)})


@router.get("/records/{record}", openapi_extra=declares(answer=_KEPT))
async def read(request: Request, record: Readable, state: Here, offset: Offset = 0) -> Response:
    """Read complete lines from byte `offset` on, without line endings.

    `next` is the offset of the next read; it equals `offset` at the end of the record.
    """
    state.check_open()
    path = state.folder.ledger if record == "ledger" else state.folder.handed_over[record]
    lines, after = await asyncio.to_thread(_lines, path, offset)
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
    raise InputError("a line is not a JSON object", "send each line as one JSON object without its line ending")
