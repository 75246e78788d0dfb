"""A rollout server that is stopped while episodes run on it: their turns go on elsewhere from the tokens they have."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.servers.balancer import Balancer, ServerLoad
from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.engines.base import EngineInfo
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.clients.rollout import RolloutClient
from shared.models.config import ModelConfig
from shared.services_schema import Limits, ServicesSection
from shared.web.serving import HttpServer, make_server
from tests.orchestrator.fakes import BOUNDS, V0, ScriptedEnv, runner_of, spec
from tests.support.engine import SETTINGS
from tests.support.tokenizer import FOLDER, tiny_tokenizer
from tools.simulated.rollout import SimulatedEngine, _Weights

_GRACE_S = 0.1


@dataclass
class Server:
    """The rollout service around a simulated engine, whose tokens take 30 ms each."""

    url: str
    engine: SimulatedEngine
    http: HttpServer
    draining: asyncio.Task[None]

    def terminate(self) -> None:
        """As the service does at SIGTERM."""
        self.http.should_exit = True
        self.draining.cancel()


@asynccontextmanager
async def running() -> AsyncIterator[Server]:
    sizes = EngineInfo(tiny_tokenizer().vocab_size, BOUNDS.context_length, 4096, 64, (tiny_tokenizer().eos_id,), 0.0, 1)
    engine = SimulatedEngine(sizes, serving=_Weights(str(V0), "", {}))
    updates = WeightUpdater(engine, None, ModelConfig.read(Path(FOLDER)), "test", state=Serving(str(V0)))
    generation = GenerationRunner(engine, _GRACE_S, updates)
    app = build_app(replace(SETTINGS, limits=Limits(grace_s=1)), engine, updates, generation, None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = make_server(app, ServicesSection(limits=Limits(grace_s=60)))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        server = Server(f"http://127.0.0.1:{port}", engine, http, asyncio.create_task(generation.drain()))
        while not http.started:
            await asyncio.sleep(0.005)
        try:
            yield server
        finally:
            server.terminate()
            await asyncio.gather(serving, server.draining, return_exceptions=True)


async def test_every_token_that_a_stopped_server_has_sampled_is_in_an_episode() -> None:
    async with running() as first, running() as second, RolloutClient(first.url) as a, RolloutClient(second.url) as b:
        balancer = Balancer(1)
        for server, client in ((first, a), (second, b)):
            balancer.add(ServerLoad(server.url, client, version=V0, capacity=64))
        runner = runner_of(ScriptedEnv(n_turns=4), balancer)
        playing = [
            asyncio.create_task(runner.run(replace(spec(), sample_index=i), TokenBudget(BOUNDS.max_attempts)))
            for i in range(24)
        ]
        while first.engine.output_tokens < 40:
            await asyncio.sleep(0.01)
        first.terminate()
        episodes = await asyncio.gather(*playing)
    sampled = Counter[str]()
    for one in episodes:
        one.validate()
        for span in one.all_spans():
            assert span.version == str(V0)
            sampled[span.server] += span.end - span.start
    assert sampled == {first.url: first.engine.output_tokens, second.url: second.engine.output_tokens}
    moved = [
        one
        for one in episodes
        if any(s.server == first.url and t.server == second.url and s.end == t.start for s, t in pairwise(one.versions))
    ]
    assert moved  # within a turn
    assert all(sum(one.failures.values()) <= 1 for one in episodes)
