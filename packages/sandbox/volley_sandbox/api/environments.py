"""Routes of environments as resources: submit, replace, show, activate, retire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.env.api.answers import OfferedEnvironment
from services.env.api.state import state_of
from shared.errors import InputError
from shared.web import http
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import declares
from shared.web.routes import ServiceRoutes
from volley_sandbox.api.answers import LogShown, SubmittedShown, VersionsShown, submitted
from volley_sandbox.api.schemas import (
    AdapterBody,
    InstalledBody,
    RegisterBody,
    RemoteBody,
    ReplaceBody,
    SubmitBody,
    SubmitQuery,
)
from volley_sandbox.backends.remote.protocols import RemoteEnvironment
from volley_sandbox.extension import extension_of
from volley_sandbox.submissions.installed import archive_of
from volley_sandbox.submissions.record import SubmittedVersion
from volley_sandbox.submissions.submission import Submission
from volley_sandbox.submissions.submissions import Submissions
from volley_sandbox.submissions.templates import source_of

router = APIRouter(tags=["environments"])
ROUTES = ServiceRoutes(
    router,
    {
        "POST /environments": Role.ADMIN,
        "GET /environments/{name}": Role.VIEWER,
        "PUT /environments/{name}": Role.ADMIN,
        "GET /environments/{name}/logs": Role.VIEWER,
        "POST /environments/{name}/activate": Role.ADMIN,
        "POST /environments/{name}/retire": Role.ADMIN,
    },
)
PYTHON = ("text/x-python", "application/x-python", "text/x-script.python")
ARCHIVE = ("application/zip", "application/x-zip-compressed", "application/x-wheel+zip")


@router.post(
    "/environments",
    status_code=202,
    openapi_extra=declares(body=SubmitBody, answer=OfferedEnvironment, statuses=(200, 201, 202)),
)
async def submit_environment(request: Request) -> Response:
    """Submit an environment (202), or add a variant of a built-in one.

    Forms of a submission: a Python file (its text as the body with Content-Type text/x-python and `?name=`, or `{name,
    source}`); a zip file or wheel (application/zip), also of Harbor task folders; a remote environment (`{name, url,
    protocol, config}`); one of an installed package (`{name, import_path, config}`); one played by an adapter (`{name,
    adapter, config}`). `{name, base, config}` adds a variant: 201, or 200 if it exists with these settings.
    """
    state = state_of(request)
    if _is_file(request):
        return _respond_version(request, await _submissions(request).submit(await _file(request)), 202)
    raw = await http.read_body(request)
    if "base" not in raw:
        return _respond_version(request, await _submissions(request).submit(await _object(raw)), 202)
    body = http.validated(RegisterBody, raw, strict=True)
    entry, new = await state.catalogue.register(body.name, body.base, body.config, body.weight)
    await state.content.ensure(entry)
    return respond(request, entry.describe(), 201 if new else 200)


@router.put(
    "/environments/{name}",
    status_code=202,
    openapi_extra=declares(body=ReplaceBody, answer=SubmittedShown, statuses=(202,)),
)
async def replace_environment(request: Request, name: str) -> Response:
    """Submit a new version. The present version stays in use until the new one is promoted."""
    given = await _file(request, name) if _is_file(request) else await _object(await http.read_body(request), name)
    return _respond_version(request, await _submissions(request).replace(given), 202)


@router.get("/environments/{name}", openapi_extra=declares(answer=VersionsShown))
async def show_environment(request: Request, name: str) -> Response:
    """Show the versions of a submitted environment, or the one `NAME@VERSION`."""
    state = state_of(request)
    rows = [
        {
            **submitted(version),
            "trouble": state.trouble(version.full_name),
            "failures": _submissions(request).failures(version.full_name),
        }
        for version in _submissions(request).versions(name)
    ]
    return respond(request, {"name": name, "versions": rows})


@router.get("/environments/{name}/logs", openapi_extra=declares(answer=LogShown))
async def show_log(request: Request, name: str) -> Response:
    """Show the newest version's recent output since the service started, and its recent failures."""
    submissions = _submissions(request)
    version = submissions.versions(name)[-1]
    return respond(request, {"name": version.full_name, "log": submissions.log(version)})


@router.post("/environments/{name}/activate", openapi_extra=declares(answer=SubmittedShown))
async def activate_environment(request: Request, name: str) -> Response:
    """Put a version in use: promote a canary at once, or return to a retired version (`NAME@VERSION`)."""
    return _respond_version(request, await _submissions(request).activate(name), 200)


@router.post("/environments/{name}/retire", openapi_extra=declares(answer=SubmittedShown))
async def retire_environment(request: Request, name: str) -> Response:
    """Retire a version: live runs start no more groups of it."""
    return _respond_version(request, await _submissions(request).retire(name), 200)


def _submissions(request: Request) -> Submissions:
    return extension_of(request).submissions


def _respond_version(request: Request, version: SubmittedVersion, status: int) -> Response:
    return respond(request, submitted(version), status)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_file(request: Request) -> bool:
    return _media_type(request) in (*PYTHON, *ARCHIVE)


async def _file(request: Request, name: str | None = None) -> Submission:
    """Read a submission from the body (the file) and the query.

    Args:
        name: the name in the path, if it has one.

    Raises InputError.
    """
    query = http.validated(SubmitQuery, _named(dict(request.query_params), name), strict=False)
    archive = _media_type(request) in ARCHIVE
    return Submission(query.name, await request.body(), query.entry, query.config, query.weight, archive)


async def _object(raw: Mapping[str, Any], name: str | None = None) -> Submission:
    """Read a submission from a JSON object. Raises InputError."""
    if "url" in raw:
        far = http.validated(RemoteBody, _named(raw, name), strict=True)
        tasks = {split: text.encode("utf-8", "surrogatepass") for split, text in far.tasks.items()}
        there = RemoteEnvironment(far.protocol, far.url, far.config, tasks)
        return Submission(far.name, there, None, far.config, far.weight)
    if "adapter" in raw:
        asked = http.validated(AdapterBody, _named(raw, name), strict=True)
        return Submission(asked.name, source_of(asked.adapter), None, asked.config, asked.weight)
    if "import_path" in raw:
        chosen = http.validated(InstalledBody, _named(raw, name), strict=True)
        content = await asyncio.to_thread(archive_of, chosen.import_path)
        return Submission(chosen.name, content, chosen.import_path, chosen.config, chosen.weight, archive=True)
    body = http.validated(SubmitBody, _named(raw, name), strict=True)
    return Submission(body.name, body.source.encode("utf-8", "surrogatepass"), body.entry, body.config, body.weight)


def _named(given: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Add the path's name to the body.

    Raises InputError if the body has a different name, or a name with a version.
    """
    if name is not None and given.get("name", name) != name:
        raise InputError(f"the body's name {str(given['name'])[:80]!r} differs from the path's name {name[:80]!r}")
    named = {**given, "name": name} if name is not None else dict(given)
    if "@" in str(named.get("name", "")):
        raise InputError(f"{str(named['name'])[:80]!r}: versions are numbered by the service", "remove the @")
    return named
