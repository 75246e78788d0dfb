"""Answers to a browser, packed by gzip if it accepts that: a page is often read through an SSH tunnel."""

from __future__ import annotations

import gzip
import mimetypes
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from fastapi import BackgroundTasks, Request
from fastapi.responses import Response

from shared.web.assets import Asset

_LEAST = 1024
_CHECKED = {"Cache-Control": "no-cache"}
_PACKED = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


def json_answer(request: Request, value: Any, later: BackgroundTasks | None = None) -> Response:
    content, headers = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY), dict[str, str]()
    if len(content) >= _LEAST and _accepts_gzip(request):
        content, headers = gzip.compress(content, 1), _PACKED
    return Response(content, media_type="application/json", headers=headers, background=later)


def file_answer(request: Request, path: Path) -> Response:
    """Answer with a file of the page, read and packed once."""
    packed = _accepts_gzip(request)
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Asset(_content(path, packed), headers=_CHECKED | (_PACKED if packed else {}), media_type=media_type)


@cache
def _content(path: Path, packed: bool) -> bytes:
    content = path.read_bytes()
    return gzip.compress(content) if packed else content


def _accepts_gzip(request: Request) -> bool:
    return "gzip" in map(str.strip, request.headers.get("accept-encoding", "").split(","))
