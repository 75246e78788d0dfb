"""The page `/docs`: Swagger UI for the service's own OpenAPI document, loaded from the service alone.

Page, assets and document hold nothing secret and are open to everyone, since a browser sends no token when it opens an
address. The token entered at *Authorize* is sent with the requests that are tried out, and not stored. All addresses
are relative, so that the page also works below a proxy's prefix. The page's policy allows only its two scripts.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from shared.web.access import Role
from volley_dashboard.assets import Asset, asset

_OWN = Path(__file__).parent
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI sets styles of elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_CACHED = {**_HEADERS, "Cache-Control": "public, max-age=3600"}
_ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png", "start.js")
ROLES = {f"GET {path}": Role.ANYONE for path in ("/docs", "/openapi.json", *(f"/docs/{name}" for name in _ASSETS))}
_SCHEME = "bearer"


def add(app: FastAPI, roles: Mapping[str, Role], *, secured: bool) -> None:
    """Add the page and its assets; the document then names the role of each route.

    Args:
        roles: of all routes, {"POST /episodes/{id}/step": Role.SERVICE}; a missing route requires admin.
        secured: True if the service requires tokens.
    """
    page = (_OWN / "page.html").read_text(encoding="utf-8").replace("TITLE", html.escape(app.title))
    for name in _ASSETS:
        app.add_api_route(f"/docs/{name}", _asset(name), methods=["GET"], include_in_schema=False)
    plain, encoded = app.openapi, list[bytes]()

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_roles(plain(), roles) if secured else plain()
        return app.openapi_schema

    async def show() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    async def document() -> Response:
        if not encoded:
            encoded.append(orjson.dumps(openapi()))
        return Asset(encoded[0], media_type="application/json")

    app.openapi = openapi
    app.add_api_route("/docs", show, methods=["GET"], include_in_schema=False)
    app.add_api_route("/openapi.json", document, methods=["GET"], include_in_schema=False)


def _asset(name: str) -> Any:
    path = _OWN / name if name == "start.js" else _package() / name

    async def send() -> Response:
        return asset(path, _CACHED)

    return send


def _package() -> Path:
    """Return the folder of Swagger UI's files, found without importing their package."""
    found = find_spec("fastapi_offline")
    assert found is not None, "fastapi-offline is a dependency"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "static"


def _with_roles(document: dict[str, Any], roles: Mapping[str, Role]) -> dict[str, Any]:
    """Add a security scheme and every operation's role to the document."""
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes[_SCHEME] = {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of one of the roles viewer, service and admin, each of which includes those before it. "
        "`volley access RUN` lists the files of a run's tokens.",
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            role = roles.get(f"{method.upper()} {path}", Role.ADMIN)
            if role is not Role.ANYONE:
                operation["security"] = [{_SCHEME: []}]
            operation["x-role"] = str(role)
            operation["description"] = f"{operation.get('description', '')}\n\nRole: **{role}**".strip()
    return document
