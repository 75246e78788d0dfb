"""Routes of the dashboard. It reads run folders and asks services for their state; it changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, BackgroundTasks, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from shared.errors import Forbidden, NotFound, RateLimited
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role
from shared.web.http import create_app
from volley_dashboard.page import commands
from volley_dashboard.page.advice import advise
from volley_dashboard.page.answers import PageFiles, json_answer
from volley_dashboard.page.entrance import CookieAccess, Entrance
from volley_dashboard.page.handovers import handovers
from volley_dashboard.page.live import FleetReports, edition, events
from volley_dashboard.page.logs import log_end
from volley_dashboard.page.runs import Runs
from volley_dashboard.trajectories import files as exports
from volley_dashboard.trajectories.archived import ArchivedEpisodes
from volley_dashboard.trajectories.index import Filters, Listing, undone
from volley_python.client.run_reader import RunReader, Snapshot

STATIC = Path(__file__).with_name("static")
_FILES = PageFiles(STATIC)
_MOST_STREAMS = 32
_MOST_OPEN = 8
_BLOCK = 2**18
_MEDIA_TYPES = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_MOST_POINTS = 1000
"""Steps of a curve that are sent; a browser draws no more."""
_MOST_FILES = 24
"""Archived files that one request indexes; the page asks again while files are waiting."""

ROLES = {
    "GET /": Role.ANYONE,
    "GET /login": Role.ANYONE,
    "GET /static/{digest}/{name}": Role.ANYONE,
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
        self._fleets: dict[str, FleetReports] = {}

    def archived(self, files: RunReader) -> ArchivedEpisodes:
        """Blocks: it opens a database."""
        _check(files)
        key = f"{files.folder.path}\n{files.began!r}"
        with self._opening:
            found = self._archives.pop(key, None) or ArchivedEpisodes(files.folder)
            self._archives[key] = found
            while len(self._archives) > _MOST_OPEN:
                del self._archives[next(iter(self._archives))]
        return found

    def fleet(self, files: RunReader) -> FleetReports:
        _check(files)
        return self._fleets.setdefault(f"{files.folder.path}\n{files.began!r}", FleetReports(files))


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
    app.add_middleware(CookieAccess, script=_FILES.inline["start.js"], style=_FILES.inline["style.css"])
    return app


def _check(files: RunReader) -> None:
    if files.problem is not None:
        raise Forbidden(f"{files.folder.path}: {files.problem}", "the folder holds files that no run writes")


def _state(request: Request) -> DashboardState:
    return request.app.state.dashboard


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return _FILES.answer(request, "index.html")


@router.get("/static/{digest}/{name}", include_in_schema=False)
async def static(request: Request, digest: str, name: str) -> Response:
    if digest != _FILES.digest:
        raise NotFound(f"this dashboard has no files {digest[:100]}", "reload the page")
    return _FILES.answer(request, name)


@router.get("/login", include_in_schema=False)
async def login(request: Request, code: str = "") -> Response:
    """Exchange the code of the printed link for a cookie, once."""
    entrance = _state(request).entrance
    if not entrance.admits(code):
        raise Forbidden("this link was used before, or is wrong", "`volley dashboard` prints a new one")
    return RedirectResponse("/", 303, {"Set-Cookie": entrance.cookie(request.scope), "Cache-Control": "no-store"})


@router.get("/api/runs", tags=["dashboard"])
async def list_runs(request: Request) -> Response:
    """Summaries of all runs, the newest first. Services of running ones that take long are asked after the answer."""
    state = _state(request)
    found, fleets = await asyncio.to_thread(_summaries, state)
    later = BackgroundTasks()
    for name, now in zip(fleets, await asyncio.gather(*(one.state() for one in fleets.values())), strict=True):
        found[name]["state"] = now
        later.add_task(fleets[name].report)
    return json_answer(request, list(found.values()), later)


def _summaries(state: DashboardState) -> tuple[dict[str, dict[str, Any]], dict[str, FleetReports]]:
    """Return the summaries by run, and the services of those that run."""
    found = {one.name: dataclasses.asdict(one) for one in state.runs.summaries()}
    running = [name for name, one in found.items() if one["state"] == "running"]
    return found, {name: state.fleet(state.runs.open(name)) for name in running}


@router.get("/api/runs/{run}", tags=["dashboard"])
async def one_run(request: Request, run: str, columns: str | None = None) -> Response:
    """Summary, configuration, curves, advice and dispositions of tickets of a run.

    `columns`: the curves to send, separated by commas. The first answer about a long run has a sample of its steps, and
    neither advice nor dispositions; its `edition` is an old one.
    """
    files = await asyncio.to_thread(_state(request).runs.open, run)
    found = await asyncio.to_thread(_described, files, None if columns is None else tuple(columns.split(",")))
    if found["summary"]["state"] == "running":
        found["summary"]["state"] = await _state(request).fleet(files).state()
    return await asyncio.to_thread(json_answer, request, found)


def _described(files: RunReader, columns: tuple[str, ...] | None) -> dict[str, Any]:
    known = files.glance()
    summary = files.summary(known)
    found = {"summary": dataclasses.asdict(summary), "config": dict(known.config)}
    if files.problem is not None:
        return found
    head = known.head
    return found | {
        "curves": _curves(known, columns),
        "advice": _advice(known),
        "edition": edition(known.revision, summary.state),
        "n_steps": len(known.train) or len(known.sft),
        "log": log_end(files.folder) if summary.failed else None,
        "commands": commands.of_run(summary) if head is not None else [],
        "dispositions": known.dispositions,
        "handovers": handovers(known.handovers, str(known.config.get("rollout.update_mode") or "retract")),
        "chain": head.chain.steps if head is not None else None,
        "version": None if head is None else str(head.version),
    }


@lru_cache(maxsize=_MOST_OPEN)
def _curves(known: Snapshot, columns: tuple[str, ...] | None) -> dict[str, dict[str, Any]]:
    return known.curves(_MOST_POINTS, columns)


@lru_cache(maxsize=_MOST_OPEN)
def _advice(known: Snapshot) -> list[dict[str, Any]]:
    """Return advice; none from a sample."""
    return [dataclasses.asdict(one) for one in advise(known.train, known.rates)] if known.revision is not None else []


@router.get("/api/runs/{run}/fleet", tags=["dashboard"])
async def fleet(request: Request, run: str) -> Response:
    """State of the run's services, and who waits for whom."""
    files = await asyncio.to_thread(_state(request).runs.open, run)
    return json_answer(request, await _state(request).fleet(files).report())


@router.get("/api/runs/{run}/events", tags=["dashboard"])
async def follow(request: Request, run: str, seen: str = "") -> Response:
    """Server-sent events of a run: `records` and `fleet`. `seen`: the `edition` that was drawn."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    fleet = state.fleet(files)
    if state.streams >= _MOST_STREAMS:
        raise RateLimited(f"{_MOST_STREAMS} pages are open", "close some", 10.0)

    async def counted() -> AsyncIterator[bytes]:
        state.streams += 1
        try:
            async for event in events(files, fleet, state.ended, seen):
                yield event
        finally:
            state.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/api/runs/{run}/episodes", tags=["dashboard"])
async def list_episodes(request: Request, run: str, asked: Annotated[Listing, Query()]) -> Response:
    """Archived episodes that meet the filters. `waiting`: archived files that are not indexed yet."""
    state = _state(request)
    files = await asyncio.to_thread(state.runs.open, run)
    return json_answer(request, await asyncio.to_thread(_listed, state, files, asked))


def _listed(state: DashboardState, files: RunReader, asked: Listing) -> dict[str, Any]:
    index = state.archived(files).index
    waiting = index.refresh(most_files=_MOST_FILES)
    page = index.page(asked)
    answers = state.archived(files).answers(page["rows"])
    for row, is_undone, answer in zip(page["rows"], undone(page["rows"], files.head), answers, strict=True):
        row |= {"undone": is_undone, "answer": answer}
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
    archived = await asyncio.to_thread(state.archived, files)
    found = await asyncio.to_thread(archived.ticket, ticket, version)
    beside = await asyncio.to_thread(archived.index.neighbours, found["version"], ticket)
    return json_answer(request, found | {"commands": commands.of_ticket(found["path"], found), "neighbours": beside})
