"""A server that speaks NeMo-Gym's requests, as a process of its own that tests can kill: python -m … PORT [MODE].

MODE `verify` (default): a counter, as of NeMo-Gym's example of session state: `initial_count`, the tool `increment`,
right is who leaves it at `expected_count`. `step`: say the row's `word`, in three turns. `nan`, `text`, `refuse`:
/verify answers with a reward that is none, with no JSON, with 422. `slow` says that it is asked to /verify and
never answers. `head`: other paths.
"""

import itertools
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COUNTS: dict[str, int] = {}
_SESSIONS = itertools.count(1)
PATHS = {"step": ["/reset", "/step"], "head": ["/server_instances"]}


class Handler(BaseHTTPRequestHandler):
    protocol_version, mode = "HTTP/1.1", "verify"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, {"paths": dict.fromkeys(PATHS.get(self.mode, ["/seed_session", "/increment", "/verify"]))})

    def do_POST(self) -> None:
        self.session = self.headers.get("Cookie", "").partition("=")[2] or str(next(_SESSIONS))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        called = {"/seed_session": self.seed, "/reset": self.reset, "/step": self.step, "/verify": self.verify}
        self.answer(*called.get(self.path, self.increment)(body))

    def seed(self, body: dict[str, Any]) -> tuple[int, Any]:
        COUNTS[self.session] = body["initial_count"]
        return 200, {}

    def increment(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not isinstance(body.get("by"), int):
            return 422, {"detail": "by: an integer"}
        COUNTS[self.session] = COUNTS.get(self.session, 0) + body["by"]
        return 200, {"count": COUNTS[self.session]}

    def verify(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.mode == "slow":
            sys.stdout.write("verify\n")
            sys.stdout.flush()
            time.sleep(600)
        if self.mode == "refuse":
            return 422, {"detail": "expected_count: missing"}
        if self.mode == "text":
            return 200, None
        reward = float(COUNTS.get(self.session, 0) == body["expected_count"])
        found = {"reward": "a lot" if self.mode == "nan" else reward, "n_items": len(body["response"]["output"])}
        return 200, {**body, **found}

    def reset(self, body: dict[str, Any]) -> tuple[int, Any]:
        COUNTS[self.session] = 0
        return 200, {"observation": f"Say {body['word']}.", "info": {}}

    def step(self, body: dict[str, Any]) -> tuple[int, Any]:
        COUNTS[self.session] += 1
        right = body["response"]["output"][-1]["content"][0]["text"] == body["word"]
        done = {"terminated": right, "truncated": COUNTS[self.session] == 3 and not right}
        told = {"observation": None if right else "no", "reward": 1.0 if right else -0.25}
        return 200, {**done, **told, "info": {"turn": COUNTS[self.session]}}

    def answer(self, status: int, value: Any) -> None:
        data = b"fine" if value is None else json.dumps(value, separators=(",", ":")).encode()
        self.send_response(status)
        if self.command == "POST":
            self.send_header("Set-Cookie", f"Counter___counter={self.session}; path=/; HttpOnly; SameSite=lax")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(port: int, mode: str) -> None:
    Handler.mode = mode
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "verify")
