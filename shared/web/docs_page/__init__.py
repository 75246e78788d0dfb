"""The page `/docs`: Swagger UI on the service's own OpenAPI document. Everything it loads comes from the service
itself.

Page, assets and document hold nothing secret and are open to everyone, since a browser sends no token when it opens an
address; the token that *Authorize* asks for is sent with the requests that are tried out, and kept nowhere. All
addresses are relative, so that the page also works below a prefix of a proxy's. The page's policy allows no script but
the two it names.
"""

from __future__ import annotations

import html
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from shared.web.access import Role
from shared.web.routing import DeclaredRoute, Handler, ServiceApp

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
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon.png": "image/png",
    "start.js": "text/javascript; charset=utf-8",
}
ROLES = {f"GET {path}": Role.ANYONE for path in ("/docs", "/openapi.json", *(f"/docs/{name}" for name in _ASSETS))}


def add(app: ServiceApp) -> None:
    """Adds the page, its assets, and the document; none of them is in the document."""
    page = (_OWN / "page.html").read_text().replace("TITLE", html.escape(app.title))

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    async def document(_: Request) -> Response:
        return JSONResponse(app.openapi())

    assets = {f"/docs/{name}": _asset(name, media_type) for name, media_type in _ASSETS.items()}
    for path, handler in {"/docs": show, "/openapi.json": document, **assets}.items():
        app.routes.append(DeclaredRoute(path, handler, "GET", None))


def _asset(name: str, media_type: str) -> Handler:
    async def send(_: Request) -> Response:
        path = _OWN / name if name == "start.js" else _package() / name
        return FileResponse(path, media_type=media_type, headers={**_HEADERS, "Cache-Control": "public, max-age=3600"})

    return send


def _package() -> Path:
    """The folder of Swagger UI's files, found without importing the package around them."""
    found = find_spec("fastapi_offline")
    assert found is not None, "fastapi-offline is a dependency"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "static"
