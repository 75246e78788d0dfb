"""Static content, sent whole from memory.

Its cost does not depend on a request's headers: ranges are not supported. A block is sent when the connection has room
for it, so a client that does not read keeps no copy of the content in memory.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

_BLOCK = 64 * 1024


class Asset(Response):
    """Answer with content of any size, in blocks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for start in range(0, len(content), _BLOCK):
            block = bytes(content[start : start + _BLOCK])
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def asset(path: Path, headers: Mapping[str, str]) -> Response:
    """Answer with a file of the program, read once."""
    content, media_type = _read(path)
    return Asset(content, headers=dict(headers), media_type=media_type)


@cache
def _read(path: Path) -> tuple[bytes, str]:
    return path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream"
