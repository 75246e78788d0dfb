"""A judge as a process of its own, which tests can kill: python -m … PORT LOG. It speaks OpenAI's chat completions, and
its grade, 0 to 10, follows from the answer alone. Each question that it answers is a line of LOG: its digest.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.net import wait_http

_ANSWER = re.compile(r"<answer-(\w+)>\n(.*?)\n</answer-\1>", re.DOTALL)


class Judge(BaseHTTPRequestHandler):
    protocol_version, log = "HTTP/1.1", Path()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        found = _ANSWER.search(json.loads(raw)["messages"][-1]["content"])
        assert found is not None
        grade = sum(found[2].encode()) % 11
        message = {"role": "assistant", "content": f"I have read it.\nScore: {grade}"}
        with self.log.open("a") as log:
            log.write(hashlib.sha256(raw).hexdigest() + "\n")
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer({"id": "c", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 100}})

    def answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def judge_process(port: int, log: Path) -> Iterator[None]:
    """The judge, until the end of the context, where it is killed."""
    with subprocess.Popen([sys.executable, "-m", "tests.support.judge", str(port), str(log)]) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/")
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    Judge.log = Path(sys.argv[2])
    served = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
    served.daemon_threads = True
    served.serve_forever()
