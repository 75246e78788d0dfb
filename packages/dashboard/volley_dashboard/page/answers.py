"""Answers to a browser, packed by gzip if it accepts that: a page is often read through an SSH tunnel."""

from __future__ import annotations

import base64
import gzip
import hashlib
import mimetypes
from pathlib import Path
from typing import Any

import orjson
from fastapi import BackgroundTasks, Request
from fastapi.responses import Response

from shared.errors import NotFound
from volley_dashboard.assets import Asset

_LEAST, _PAGE = 1024, "index.html"
_INLINE = {
    "start.js": (b'<script src="/static/start.js"></script>', b"<script>%s</script>"),
    "style.css": (b'<link rel="stylesheet" href="/static/style.css">', b"<style>%s</style>"),
}
"""Files that stand in the page itself: of a browser's six connections, the request for a run's data is to get one."""
_CHECKED, _KEPT = {"Cache-Control": "no-cache"}, {"Cache-Control": "max-age=31536000, immutable"}
_PACKED = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


def json_answer(request: Request, value: Any, later: BackgroundTasks | None = None) -> Response:
    content, headers = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY), dict[str, str]()
    if len(content) >= _LEAST and _accepts_gzip(request):
        content, headers = gzip.compress(content, 1), _PACKED
    return Response(content, media_type="application/json", headers=headers, background=later)


class PageFiles:
    """Files of the page, read and packed once.

    The page names the others below the digest of all (`/static/DIGEST/app.js`), so that a browser keeps them until they
    change. `inline`: what a content security policy calls those that stand in the page.
    """

    def __init__(self, folder: Path) -> None:
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}
        self.digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:16]
        self.inline = dict[str, str]()
        for name, (link, form) in _INLINE.items():
            content = files.pop(name, b"")
            self.inline[name] = f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
            files |= {_PAGE: files[_PAGE].replace(link, form % content)} if _PAGE in files else {}
        named = f"/static/{self.digest}/".encode()
        self._plain = {
            name: content.replace(b"/static/", named) if name == _PAGE else content for name, content in files.items()
        }
        self._packed = {name: gzip.compress(content) for name, content in self._plain.items()}

    def answer(self, request: Request, name: str) -> Response:
        """Raises NotFound."""
        packed = _accepts_gzip(request)
        if (content := (self._packed if packed else self._plain).get(name)) is None:
            raise NotFound(f"there is no file {name[:100]}")
        headers = (_CHECKED if name == _PAGE else _KEPT) | (_PACKED if packed else {})
        return Asset(content, headers=headers, media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")


def _accepts_gzip(request: Request) -> bool:
    return "gzip" in map(str.strip, request.headers.get("accept-encoding", "").split(","))
