"""HTTP to the run's folder, which is the trainer's alone: records that the orchestrator hands over, and is given
back where its own are lost.

Invariant: a line is in the folder once, however often it is handed over, and durable before the answer. So whoever
makes a record repeats it until it is answered, and a folder that both share holds it once as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import ConfigError, DecodeError, InputError, NotFound
from shared.files import storage
from shared.files.reading import MAX_RECORD_BYTES, ended_lines, open_file
from shared.run.folder import Record, RunFolder
from shared.run.mixture import parse
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
    """State of the routes; lives in `app.state.records`.

    `check_open` raises while the folder takes nothing; `check_mixture` is given the lines of mixture.jsonl, those that
    are new and those that are there, and raises InputError for a new one that is none of the run's.
    """

    folder: RunFolder
    check_open: Callable[[], None] = lambda: None
    check_mixture: Callable[[Sequence[bytes], Collection[bytes]], Awaitable[None]] | None = None
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

    def append() -> None:
        storage.blank_torn_line(path)
        storage.append(path, b"".join(line + b"\n" for line in new), durable=True)

    async with state.alone:
        known = set(await asyncio.to_thread(storage.whole_lines, path))
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if record == "mixture" and new and state.check_mixture is not None:
            await state.check_mixture(new, known)
        if new:  # never in a folder of both, where the orchestrator may be writing
            await asyncio.to_thread(append)
        return respond(request, {"added": len(new)})


class KnownEnvironments:
    """Which environments a line of mixture.jsonl may name.

    Args:
        configured: those of the configuration.
        versions: asks the environment service for one by name; raises NotFound.
    """

    def __init__(self, configured: Collection[str], versions: Callable[[str], Awaitable[object]]) -> None:
        self._configured, self._versions = frozenset(configured), versions

    async def check(self, new: Sequence[bytes], there: Collection[bytes]) -> None:
        """Raises InputError for a line that names an environment which neither the configuration nor the environment
        service knows, nor a line that is there; DecodeError for one that is no change of a mixture; and Unavailable
        while the service cannot be asked.
        """
        known = set(self._configured)
        for line in there:
            with contextlib.suppress(DecodeError):
                known |= _named(line)
        for name in sorted({name for line in new for name in _named(line)} - known):
            try:
                await self._versions(name)
            except NotFound as error:
                raise InputError(
                    f"a change of the mixture names {name[:80]!r}, an environment that the run does not know",
                    "submit it to the environment service first, or name it in data.mixture",
                ) from error


def _named(line: bytes) -> set[str]:
    """The environments that a line names. Raises DecodeError."""
    change = parse(line)
    return {*change.weights, *change.first, *change.sizes}


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
