"""What a bucket's client makes of a slow link."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from volley_bucket import objects as buckets
from volley_bucket.objects import Bucket

_N_BYTES = 24
_UPLOAD = b"<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"
_MADE = b"<CompleteMultipartUploadResult><ETag>one</ETag></CompleteMultipartUploadResult>"


class SlowLink(BaseHTTPRequestHandler):
    """Answers byte by byte; of an upload it takes no part before four are on their way."""

    protocol_version = "HTTP/1.1"
    parts, most, counted = 0, 0, threading.Condition()

    def do_GET(self) -> None:
        self._answer(b"")
        for _ in range(_N_BYTES):
            time.sleep(0.5)
            self.wfile.write(b"x")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(_UPLOAD if "uploads" in self.path else _MADE)

    def do_PUT(self) -> None:
        cls = type(self)
        with cls.counted:
            cls.parts += 1
            cls.most = max(cls.most, cls.parts)
            cls.counted.notify_all()
            cls.counted.wait_for(lambda: cls.most >= 4, 60)
        time.sleep(0.5)  # more of them would be here by now
        self.rfile.read(int(self.headers["content-length"]))
        with cls.counted:
            cls.parts -= 1
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body) or (_N_BYTES if self.command == "GET" else 0)))
        for name, value in (("etag", '"one"'), ("last-modified", "Mon, 01 Jan 2024 00:00:00 GMT")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowLink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "key")
        yield Bucket("s3://volley/slow")
        server.shutdown()


@pytest.mark.long
def test_a_body_takes_as_long_as_it_comes(slow: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the bound of a silence."""
    monkeypatch.setattr(buckets, "_IDLE_S", 10)
    assert slow.read("a", 100) == b"x" * _N_BYTES


def test_few_parts_share_the_link(slow: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(30 * 2**20)
    slow.upload("a", path)
    assert SlowLink.most == 4
