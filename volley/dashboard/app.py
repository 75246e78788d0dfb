"""Routes of the dashboard. It reads run folders and asks services for their state; it changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from shared.errors import Forbidden, NotFound, RateLimited
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role
from shared.web.http import create_app
from volley.dashboard.advice import advise
from volley.dashboard.entrance import CookieAccess, Entrance
from volley.dashboard.handovers import handovers
from volley.dashboard.live import Fleet, events
from volley.dashboard.runs import RunFiles, Runs
from volley.trajectories import files as exports
from volley.trajectories.archived import ArchivedEpisodes
from volley.trajectories.index import Filters, Listing, undone

STATIC = Path(__file__).with_name("static")
_FILES = frozenset(path.name for path in STATIC.iterdir()) if STATIC.is_dir() else frozenset[str]()
_MOST_STREAMS = 32
_MOST_OPEN = 8
_BLOCK = 2**18
_MEDIA_TYPES = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_MOST_FILES = 24
"""Archived files that one request indexes; the page asks again while files are waiting."""

ROLES = {
    "GET /": Role.ANYONE,
    "GET /login": Role.ANYONE,
    "GET /static/{name}": Role.ANYONE,
    "GET /api/runs": Role.VIEWER,
    "GET /api/runs/{run}": Role.VIEWER,
    "GET /api/runs/{run}/fleet": Role.VIEWER,
    "GET /api/runs/{run}/events": Role.VIEWER,
    "GET /api/runs/{run}/episodes": Role.VIEWER,
    "GET /api/runs/{run}/episodes.{kind}": Role.VIEWER,
    "GET /api/runs/{run}/tickets/{ticket}": Role.VIEWER,
}
router = APIRouter()


class DashboardState:
    """Open runs, their indexes and fleets; the least recently opened index is closed beyond `_MOST_OPEN`.

    Both raise Forbidden for a folder that is not read.
    """

    def __init__(self, runs: Runs, entrance: Entrance) -> None:
        self.runs, self.entrance = runs, entrance
        self.ended = asyncio.Event()
        self.streams = 0
        self._archives: dict[str, ArchivedEpisodes] = {}
        self._opening = Lock()
        self._fleets: dict[str, Fleet] = {}

    def archived(self, files: RunFiles) -> ArchivedEpisodes:
        """Blocks: it opens a database."""
        _check(files)
        key = f"{files.folder.path}\n{files.began!r}"
        with self._opening:
            found = self._archives.pop(key, None) or ArchivedEpisodes(files.folder)
            self._archives[key] = found
            while len(self._archives) > _MOST_OPEN:
                del self._archives[next(iter(self._archives))]
        return found

    def fleet(self, files: RunFiles) -> Fleet:
        _check(files)
        return self._fleets.setdefault(str(files.folder.path), Fleet(files.folder))


def make_app(runs: Runs, entrance: Entrance) -> FastAPI:
    app = create_app(
        "dashboard",
        limits=Limits(),
        tokens=AccessTokens({Role.VIEWER: entrance.token}),
        ready=lambda: None,
        roles=ROLES,
    )
    app.state.dashboard = DashboardState(runs, entrance)
    app.include_router(router)
    app.add_middleware(CookieAccess)
    return app


def _check(files: RunFiles) -> None:
    if files.problem is not None:
        raise Forbidden(f"{files.folder.path}: {files.problem}", "the folder holds files that no run writes")


def _state(request: Request) -> DashboardState:
    return request.app.state.dashboard


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


@router.get("/static/{name}", include_in_schema=False)
async def static(name: str) -> Response:
    if name not in _FILES:
        raise NotFound(f"there is no file {name[:100]}")
    return FileResponse(STATIC / name, headers={"Cache-Control": "no-cache"})


@router.get("/login", include_in_schema=False)
async def login(request: Request, code: str = "") -> Response:
    """Exchange the code of the printed link for a cookie, once."""
    entrance = _state(request).entrance
    if not entrance.admits(code):
        raise Forbidden("this link was used before, or is wrong", "`volley dashboard` prints a new one")
    return RedirectResponse("/", 303, {"Set-Cookie": entrance.cookie(request.scope), "Cache-Control": "no-store"})


@router.get("/api/runs", tags=["dashboard"])
async def list_runs(request: Request) -> Response:
    return _json(await asyncio.to_thread(_state(request).runs.summaries))


@router.get("/api/runs/{run}", tags=["dashboard"])
async def one_run(request: Request, run: str) -> Response:
    """Summary, configuration, curves, advice and dispositions of tickets of a run."""
    files = await asyncio.to_thread(_state(request).runs.open, run)
    return _json(await asyncio.to_thread(_described, files))


def _described(files: RunFiles) -> dict[str, Any]:
    known = files.snapshot()
    found = {"summary": dataclasses.asdict(files.summary(known)), "config": dict(known.config)}
    if files.problem is not None:
        return found
    head = known.head
    return found | {
        "curves": known.curves(),
        "advice": [dataclasses.asdict(one) for one in advise(known.train, known.rates)],
        "dispositions": known.dispositions,
        "handovers": handovers(known.handovers, str(known.config.get("rollout.update_mode") or "retract")),
        "chain": head.chain.steps if head is not None and head.chain is not None else None,
        "version": None if head is None else str(head.version),
    }


@router.get("/api/runs/{run}/fleet", tags=["dashboard"])
async def fleet(request: Request, run: str) -> Response:
    """State of the run's services, and who waits for whom."""
    files = await asyncio.to_thread(_state(request).runs.open, run)
    return _json(await _state(request).fleet(files).report())


@router.get("/api/runs/{run}/events", tags=["dashboard"])
async def follow(request: Request, run: str) -> Response:
    """Server-sent events of a run: `records` and `fleet`."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    fleet = state.fleet(files)
    if state.streams >= _MOST_STREAMS:
        raise RateLimited(f"{_MOST_STREAMS} pages are open", "close some", 10.0)

    async def counted() -> AsyncIterator[bytes]:
        state.streams += 1
        try:
            async for event in events(files, fleet, state.ended):
                yield event
        finally:
            state.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/api/runs/{run}/episodes", tags=["dashboard"])
async def list_episodes(request: Request, run: str, asked: Annotated[Listing, Query()]) -> Response:
    """Archived episodes that meet the filters. `waiting`: archived files that are not indexed yet."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    return _json(await asyncio.to_thread(_listed, state, files, asked))


def _listed(state: DashboardState, files: RunFiles, asked: Listing) -> dict[str, Any]:
    index = state.archived(files).index
    waiting = index.refresh(most_files=_MOST_FILES)
    page = index.page(asked)
    for row, is_undone in zip(page["rows"], undone(page["rows"], files.head), strict=True):
        row["undone"] = is_undone
    about = {"waiting": waiting, "damaged": index.damaged, "choices": index.choices()}
    return page | about | {"environments": index.environments(asked), "parquet": exports.has_parquet()}


@router.get("/api/runs/{run}/episodes.{kind}", tags=["dashboard"])
async def export_episodes(
    request: Request, run: str, kind: Literal["jsonl", "parquet"], asked: Annotated[Filters, Query()]
) -> Response:
    """Archived episodes that meet the filters, with their texts: a JSON line for each, or a row of Parquet."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    if kind == "parquet" and not exports.has_parquet():
        raise NotFound("Parquet files need the package pyarrow on the dashboard's machine", "export JSON lines")
    blocks = await asyncio.to_thread(lambda: _exported(state.archived(files), kind, asked))
    headers = {"Content-Disposition": f'attachment; filename="episodes.{kind}"'}
    return StreamingResponse(blocks, media_type=_MEDIA_TYPES[kind], headers=headers)


def _exported(archived: ArchivedEpisodes, kind: str, asked: Filters) -> Iterator[bytes]:
    archived.index.refresh()
    records = archived.records(archived.rows(asked))
    if kind == "jsonl":
        return map(exports.line, records)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the blocks are read from it later
    with exports.writer(".parquet", file) as add:
        for record in records:
            add(record)
    file.seek(0)
    return iter(lambda: file.read(_BLOCK), b"")


@router.get("/api/runs/{run}/tickets/{ticket}", tags=["dashboard"])
async def one_ticket(request: Request, run: str, ticket: int, version: str = "") -> Response:
    """All episodes of a ticket, token by token, with its line in the ledger."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    return _json(await asyncio.to_thread(lambda: state.archived(files).ticket(ticket, version)))
