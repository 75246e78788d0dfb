"""HTTP layer of all services: common routes, bodies and answers in JSON and msgpack, errors as problems.

`/health` says that the process is alive, `/ready` that requests may be routed to it; neither needs a token, nor does
the page `/docs` of a package. Every other route requires a role (shared.web.access), which `shared.web.edge` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from shared import codec, packages
from shared.bounds import MAX_OBJECTS
from shared.errors import DecodeError, InputError, Unavailable, VolleyError
from shared.process import offload, telemetry
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role, RoleTable
from shared.web.edge import DirectRoute, Edge
from shared.web.openapi import PROBLEMS
from shared.web.problems import problem_answer, problem_response
from shared.web.routes import added_routes

COMMON_ROLES = {
    "GET /health": Role.ANYONE,
    "GET /ready": Role.ANYONE,
    "GET /metrics": Role.VIEWER,
}
_MAX_ERRORS, _MAX_NAME = 10, 80
_log = telemetry.Log("http")


def create_app(
    title: str,
    *,
    limits: Limits,
    tokens: AccessTokens | None,
    ready: Callable[[], str | Unavailable | None],
    roles: Mapping[str, Role] | None = None,
    max_objects: int = MAX_OBJECTS,
    about: Callable[[], Mapping[str, Any]] = dict,
    direct: Sequence[DirectRoute] = (),
) -> FastAPI:
    """Return an application with the common routes and middleware, and the routes that packages add to it.

    Args:
        tokens: of the callers; None gives every caller full access (loopback use).
        roles: role of each route, {"POST /episodes/{id}/step": Role.SERVICE}; a missing route requires admin.
        ready: returns None if requests may be routed here, else the reason why not, as text or as an error.
        max_objects: largest number of values in a body.
        about: further fields of `/health`, public to everyone.
        direct: busy routes that are answered without FastAPI.
    """
    app = FastAPI(title=title, version="1", docs_url=None, openapi_url=None, redoc_url=None, responses=PROBLEMS)
    app.state.max_objects, app.state.max_body_bytes = max_objects, limits.max_body_bytes
    app.add_exception_handler(VolleyError, _on_volley_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    added, page = [*added_routes(title)], packages.part("docs_page", required=False)
    declared = {**COMMON_ROLES, **(roles or {}), **{key: role for one in added for key, role in one.roles.items()}}
    declared |= {} if page is None else page.ROLES
    app.state.websockets = any(key.startswith("WS ") for key in declared)
    app.add_middleware(Edge, limits=limits, tokens=tokens, roles=RoleTable(declared), direct=direct)
    if page is not None:
        page.add(app, declared, secured=tokens is not None)

    @app.get("/health", tags=["common"])
    async def health() -> dict[str, Any]:
        return {"status": "ok", "service": title, **about()}

    @app.get("/ready", tags=["common"])
    async def readiness() -> dict[str, str]:
        reason = ready()
        if reason is not None:
            raise reason if isinstance(reason, Unavailable) else Unavailable(reason)
        return {"status": "ready"}

    @app.get("/metrics", tags=["common"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        content, media_type = telemetry.exposition(request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    for one in added:
        app.include_router(one.router)
    return app


async def read_body(request: Request) -> dict[str, Any]:
    """Read the JSON or msgpack body as a dict, by Content-Type. Raises DecodeError."""
    data = await request.body()
    content_type, max_objects = request.headers.get("content-type", ""), request.app.state.max_objects
    return await offload.by_size(len(data), lambda: _object(codec.by_type(content_type, data, "body", max_objects)))


async def read_model[M: BaseModel](request: Request, model: type[M]) -> M:
    """Read the JSON or msgpack body as `model`, strictly. Raises DecodeError, or InputError naming the wrong fields."""
    data = await request.body()
    content_type, max_objects = request.headers.get("content-type", ""), request.app.state.max_objects
    return await offload.by_size(
        len(data),
        lambda: validated(model, _object(codec.by_type(content_type, data, "body", max_objects)), strict=True),
    )


def validated[M: BaseModel](model: type[M], raw: Mapping[str, Any], *, strict: bool) -> M:
    """Validate a mapping. Raises InputError naming the wrong fields, or the first of them."""
    unknown = raw.keys() - model.model_fields.keys()
    if unknown and model.model_config.get("extra") == "forbid":
        raise InputError(
            f"unknown field {min(map(str, unknown))[:_MAX_NAME]}", f"known: {', '.join(model.model_fields)}"
        )
    try:
        return model.model_validate(raw, strict=strict)
    except ValidationError as error:
        raise InputError(_format_errors(error.errors(include_url=False))) from error


def _format_errors(errors: Sequence[Any]) -> str:
    text = "; ".join(_explain(error) for error in errors[:_MAX_ERRORS])
    return text if len(errors) <= _MAX_ERRORS else f"{text};  and {len(errors) - _MAX_ERRORS} more"


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "body"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown field {key}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DecodeError(f"body must be an object, not {type(value).__name__}")
    return value


def respond(request: Request, value: Any, status: int = 200) -> Response:
    """Answer with `value` in the format of the request: msgpack for msgpack, else JSON."""
    if request.headers.get("content-type", "").startswith(codec.MEDIA_TYPE):
        return Response(codec.pack(value), status, media_type=codec.MEDIA_TYPE)
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


async def _on_volley_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, VolleyError)
    return problem_response(error, request.url.path)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(InputError(_format_errors(error.errors())), request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"type": "about:blank", "title": str(error.detail), "status": error.status_code, "detail": str(error.detail)}
    return problem_answer(body, error.headers or {}, request.url.path)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer a defect: the server logs the traceback, and the client gets no details."""
    _log.error("unhandled error", method=request.method, path=request.url.path, error=type(error).__name__)
    return problem_response(VolleyError("internal error", "see the service's log"), request.url.path)
