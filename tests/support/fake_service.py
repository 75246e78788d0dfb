"""A service of any kind that answers and does nothing else: python -m tests.support.fake_service ARGUMENTS.

It takes the arguments of a real one. Paths other than /health and /ready ask for the viewer's token, and tell which run
it serves.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml


class FakeService(BaseHTTPRequestHandler):
    kind, run, token = "", "", ""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in ("/health", "/ready"):
            self._send(200, {"status": "ok", "service": self.kind})
        elif self.headers["Authorization"] != f"Bearer {self.token}":
            self._send(401, {"detail": "a token is missing"})
        else:
            self._send(200, {"run": self.run, "name": self.run, "path": self.path})

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(arguments: list[str]) -> None:
    run, chosen = (yaml.safe_load(Path(arguments[i + 1]).read_text(encoding="utf-8")) for i in (0, 2))
    (found,) = filter(None, (re.fullmatch(r"services\.(\w+)\.port=(\d+)", one) for one in arguments))
    token = Path(chosen["services"]["token_files"]["viewer"]).read_text(encoding="utf-8")
    FakeService.kind, FakeService.run, FakeService.token = found[1], run["run"]["name"], token.strip()
    ThreadingHTTPServer(("127.0.0.1", int(found[2])), FakeService).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
