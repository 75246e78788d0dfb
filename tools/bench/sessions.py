"""Measure the recorder of agents with 2,048 sessions that call at once, before an engine that only waits.

The recorder is a process of its own with the orchestrator's store, routes and web server; the agents are connections of
this process. Every call takes the engine 20 to 60 s; an agent begins within 30 s, and calls
again after up to a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.turn import SamplingSpec, TokenBounds, TurnSampler
from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening
from shared.clients.rollout import EngineLoad, Generation, ServerWeights
from shared.models.chat import ChatTokenizer
from shared.process.ports import free_port
from shared.services_schema import Limits, ServicesSection
from shared.teacher_view import TeacherLogprobs
from shared.types import VersionSpan, WeightVersion
from shared.web.http import create_app
from shared.web.serving import make_server
from tools.bench.result import BenchResult, emit
from volley_agents.sessions import routes
from volley_agents.sessions.calls import CallSampler
from volley_agents.sessions.session import RunningSample
from volley_agents.sessions.sessions import Sessions

N_SESSIONS, N_CALLS, N_TOKENS = 2048, 2, 32
_MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny"
_VERSION = WeightVersion(1, 0)
_TICK_S = 0.005


class WaitingEngine:
    """Answers N_TOKENS tokens after 20 to 60 s."""

    async def generate(self, input_ids: np.ndarray, sampling: Mapping[str, Any], rid: str, **_: object) -> Generation:
        draw = random.Random(sampling["sampling_seed"])
        await asyncio.sleep(draw.uniform(20.0, 60.0))
        ids = np.array([draw.randrange(10, 200) for _ in range(N_TOKENS)], np.int32)
        span = VersionSpan(str(_VERSION), 0, N_TOKENS)
        return Generation(ids, np.full(N_TOKENS, -1.0, np.float32), (span,), "length")

    async def score(self, ids: np.ndarray, start: int, *, timeout_s: float | None = None) -> TeacherLogprobs:
        return TeacherLogprobs(np.full(len(ids) - start, -1.0, np.float32), str(_VERSION))

    async def abort(self, rid: str) -> None: ...

    async def weights(self) -> ServerWeights:
        return ServerWeights(str(_VERSION), None, None)

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, N_SESSIONS, 1.0)

    async def ready(self) -> None: ...

    async def hold(self, holder: str, version: str, seconds: float) -> None: ...


class Lags:
    """How late the event loop ran a timer, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.seconds.append(time.perf_counter() - due)

    def describe(self) -> dict[str, float]:
        found, self.seconds = np.array(self.seconds), []
        return {
            "p50": float(np.quantile(found, 0.5)),
            "p99": float(np.quantile(found, 0.99)),
            "max": float(found.max()),
        }


async def serve(port: int, folder: Path) -> None:
    """Run the recorder with all its sessions until cancelled."""
    tokenizer, status, lags = ChatTokenizer(_MODEL), RunStatus(), Lags()
    bounds = TokenBounds(4096, N_TOKENS, 10 * N_CALLS, 600.0, 3)
    balancer = Balancer(1)
    balancer.add(ServerLoad("http://engine", WaitingEngine(), version=_VERSION, capacity=N_SESSIONS))
    sessions = Sessions(folder / "sessions.sqlite3", 600.0, bounds.max_turns)
    sampler = TurnSampler(balancer, status, tokenizer.end_ids, bounds)
    calls = CallSampler(tokenizer, sampler, bounds, status, "tiny")
    app = create_app("orchestrator", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)
    app.state.sessions = routes.SessionsState(sessions, calls, "")
    app.include_router(routes.router)
    keys, before = list[str](), _resident()

    @app.get("/bench")
    async def bench() -> dict[str, Any]:
        return {
            "keys": keys,
            "before": before,
            "now": _resident(),
            "cpu_s": time.process_time(),
            "lag": lags.describe(),
        }

    server = make_server(app, ServicesSection(limits=Limits(max_connections=2 * N_SESSIONS)))
    with contextlib.ExitStack() as stack:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sessions.work())
            opening = Opening("e", "train/0", [{"role": "user", "content": "play"}], agent="program")
            for ticket in range(1, N_SESSIONS + 1):
                spec = SamplingSpec("bench", "train", 0, ticket, 0, 7, {"temperature": 1.0}, VersionBounds())
                session = await sessions.begin(spec, opening, f"r{ticket}")
                stack.enter_context(session.running(RunningSample(spec, TokenBudget(3))))
                keys.append(sessions.key_of(session))
            tasks.create_task(lags.watch())
            await server.serve(
                sockets=[stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=N_SESSIONS))]
            )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@contextlib.asynccontextmanager
async def recorder(folder: Path) -> AsyncIterator[str]:
    """A recorder in a process of its own; yields its address."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, str(port), str(folder))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def agent(http: aiohttp.ClientSession, key: str, seconds: list[float]) -> None:
    """One conversation."""
    messages: list[Any] = [{"role": "user", "content": "play"}]
    for n in range(N_CALLS):
        await asyncio.sleep(random.uniform(0.0, 1.0 if n else 30.0))
        body, began = orjson.dumps({"model": "tiny", "messages": messages}), time.perf_counter()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with http.post("/v1/chat/completions", data=body, headers=headers) as answer:
            found = orjson.loads(await answer.read())
        seconds.append(time.perf_counter() - began)
        messages += [found["choices"][0]["message"], {"role": "user", "content": "go on"}]


async def measure() -> dict[str, BenchResult]:
    with tempfile.TemporaryDirectory() as folder:
        async with recorder(Path(folder)) as url:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(url, connector=connector) as http:
                first = await _described(http)
                seconds = list[float]()
                async with asyncio.TaskGroup() as tasks:
                    for key in first["keys"]:
                        tasks.create_task(agent(http, key, seconds))
                    await asyncio.sleep(31.0)
                    waiting = await _described(http)
                last = await _described(http)
    assert len(seconds) == N_SESSIONS * N_CALLS
    lag = last["lag"]
    memory = (waiting["now"] - first["before"]) / N_SESSIONS
    return {
        "event-loop lag of the recorder, p99 (aim 50)": BenchResult(1e3 * lag["p99"], "ms"),
        "event-loop lag of the recorder, longest": BenchResult(1e3 * lag["max"], "ms"),
        "CPU of the recorder for one call": BenchResult(1e3 * (last["cpu_s"] - first["cpu_s"]) / len(seconds), "ms"),
        "memory of a waiting session": BenchResult(memory / 1024, "KiB"),
        "added to an engine's 20 to 60 s, median": BenchResult(1e3 * (float(np.median(seconds)) - 40.0), "ms"),
    }


async def _described(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with http.get("/bench") as answer:
                    found = await answer.json()
                if len(found["keys"]) == N_SESSIONS:
                    return found
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])), loop_factory=uvloop.new_event_loop)
    else:
        emit(asyncio.run(measure(), loop_factory=uvloop.new_event_loop))
