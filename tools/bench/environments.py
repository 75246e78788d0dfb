"""Compare the env service with OpenEnv's own server.

Both serve the same environment (a counting echo) to the same number of sessions of the same load generator. Our service
is measured twice: with OpenEnv's frames, and with our own requests (msgpack over keep-alive connections). OpenEnv's
package runs in its own virtual environment, started with `create_app` and `uvicorn.run`. Each session sends its next
request as soon as the last is answered, so latencies are those of a fully loaded server. The figure that compares
servers is steps per CPU second of the server's process. `--rounds` alternate between servers.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgpack
import orjson
import uvloop

from shared.errors import Unavailable
from shared.process.ports import free_port
from tools.bench.load import FrameSpeaker, LoadResult, RequestSpeaker, Speaker, load
from tools.bench.result import BenchResult, emit
from tools.openenv import ECHO_SERVER
from tools.openenv.installed import openenv_python

_FILES = 16_384
_READY_S = 120.0
_MESSAGE = "I think that the answer is <answer>Right || Down</answer>"


def main(n_sessions: int, seconds: float, rounds: int) -> None:
    """Raises Unavailable if OpenEnv's package cannot be installed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard), hard))
    python = openenv_python()
    found: dict[str, list[LoadResult]] = {"openenv": [], "frames": [], "requests": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, speak, server in (
                ("openenv", openenv_frames, lambda: openenv_server(python, n_sessions)),
                ("frames", our_frames, lambda folder=folder: our_server(Path(folder), n_sessions)),
                ("requests", our_requests, lambda folder=folder: our_server(Path(folder), n_sessions)),
            ):
                with server() as (pid, port):
                    result = uvloop.run(load(port, pid, speak, n_sessions, seconds, warm_s=min(3.0, seconds)))
                found[name].append(result)
                print(f"{name}: {format_result(result)}", file=sys.stderr, flush=True)
    emit(summarize(found))


def format_result(result: LoadResult) -> str:
    return (
        f"{result.n_sessions} sessions, {result.steps_per_s:.0f} steps/s, p50 {result.quantile_ms(0.5):.0f} ms, "
        f"p99 {result.quantile_ms(0.99):.0f} ms, {result.cpu_s_per_1000:.3f} CPU s for 1,000 steps"
    )


def summarize(found: dict[str, list[LoadResult]]) -> dict[str, BenchResult]:
    """Medians over the rounds; the reference is OpenEnv's server."""
    theirs, results = found.pop("openenv"), dict[str, BenchResult]()
    for name, ours in found.items():
        for what, unit, of in _FIGURES:
            results[f"environments_{name}_{what}"] = BenchResult(_median(ours, of), unit, _median(theirs, of))
    return results


_FIGURES: Sequence[tuple[str, str, Callable[[LoadResult], float]]] = (
    ("per_core", "steps/CPU s", lambda result: 1000 / result.cpu_s_per_1000),
    ("cpu", "CPU s/1000 steps", lambda result: result.cpu_s_per_1000),
    ("steps", "steps/s", lambda result: result.steps_per_s),
    ("p50", "ms", lambda result: result.quantile_ms(0.5)),
    ("p99", "ms", lambda result: result.quantile_ms(0.99)),
)


def _median(results: Sequence[LoadResult], of: Callable[[LoadResult], float]) -> float:
    return statistics.median(of(result) for result in results)


@contextmanager
def openenv_server(python: Path, n_sessions: int) -> Iterator[tuple[int, int]]:
    port = free_port()
    with _serving([python, ECHO_SERVER, port, n_sessions], f"http://127.0.0.1:{port}/health") as pid:
        yield pid, port


@contextmanager
def our_server(folder: Path, n_sessions: int) -> Iterator[tuple[int, int]]:
    port, file = free_port(), folder / "run.yaml"
    file.write_text(
        f"model: {{path: none}}\ndata: {{env: echo}}\nrun: {{dir: {folder}}}\n"
        f"orchestrator: {{max_concurrent_episodes: {n_sessions}}}\nservices: {{env: {{port: {port}}}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "tools.simulated.echo_env", "--config", file]
    with _serving(command, f"http://127.0.0.1:{port}/ready") as pid:
        yield pid, port


@contextmanager
def _serving(command: Sequence[object], ready: str) -> Iterator[int]:
    """Start a server, and yield its process id once it is ready. Raises Unavailable."""
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + _READY_S
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() > until:
                    raise Unavailable(f"{command[1]} did not start")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - an address of our own
            return answer.status == 200
    except OSError:
        return False


def openenv_frames(number: int) -> Speaker:
    return _frames("/ws", {"seed": number})


def our_frames(number: int) -> Speaker:
    return _frames("/openenv/echo/ws", {"seed": number})


def _frames(path: str, reset: dict[str, int]) -> Speaker:
    step = orjson.dumps({"type": "step", "data": {"message": _MESSAGE}})
    return FrameSpeaker(path, orjson.dumps({"type": "reset", "data": reset}), step)


def our_requests(number: int) -> Speaker:
    body = {"request_id": str(number), "env": "echo", "split": "train", "index": number, "seed": number}
    message = {"role": "assistant", "content": _MESSAGE}

    def step(episode: bytes, n: int) -> bytes:
        return _request(b"/episodes/%s/step" % episode, {"request_id": str(n), "message": message})

    return RequestSpeaker(_request(b"/episodes", body), step, lambda answer: _episode_id(answer))


def _request(path: bytes, body: object) -> bytes:
    content = msgpack.packb(body)
    assert content is not None
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\nContent-Length: %d\r\n\r\n"
    return head % (path, len(content)) + content


def _episode_id(answer: bytes) -> bytes:
    return str(msgpack.unpackb(answer)["episode_id"]).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.bench.environments", description=__doc__)
    parser.add_argument("--sessions", type=int, default=2000, help="concurrent sessions (default: 2000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time after the warm-up (default: 10)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.sessions, arguments.seconds, arguments.rounds)
