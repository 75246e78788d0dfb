"""Servers of others as processes of their own, which tests can kill: python -m tests.support.MODULE PORT LOG."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.net import wait_http


class Answering(BaseHTTPRequestHandler):
    """Answers a POST with what `answer` makes of it; each is a line of `log`."""

    protocol_version, log = "HTTP/1.1", Path()

    def answer(self, raw: bytes) -> tuple[str, Any]:
        """The line of the log, and the answer, of a body."""
        raise NotImplementedError

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        line, value = self.answer(self.rfile.read(int(self.headers["Content-Length"])))
        with self.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        self._send(value)

    def _send(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def process(module: str, port: int, log: Path) -> Iterator[None]:
    """The server in this module, until the end of the context, where it is killed."""
    with subprocess.Popen([sys.executable, "-m", module, str(port), str(log)]) as started:
        try:
            wait_http(f"http://127.0.0.1:{port}/")
            yield
        finally:
            started.kill()


def serve(handler: type[Answering]) -> None:
    """What such a process does, for ever."""
    handler.log = Path(sys.argv[2])
    served = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), handler)
    served.daemon_threads = True
    served.serve_forever()
