"""One rollout server for several clients' weights: it is drained, loads, and never answers with others' tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response

from shared.clients.base import HttpClient
from shared.errors import Unavailable, WeightsError
from shared.services_schema import Limits
from shared.web.http import create_app, read_body, respond
from volley_tinker.server import samples
from volley_tinker.server.entries import Checkpoint, Future, RequestResult
from volley_tinker.server.sampling import SampleServer, SampleTask, version_of

PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "num_samples": 2, "sampling_params": {"max_tokens": 3}}


class Rollout:
    """A rollout server that answers with a token of the version that it serves.

    It forgets its weights after `restarts_after` answers, and refuses the versions in `broken`.
    """

    def __init__(self, restarts_after: int = 10**9, broken: tuple[str, ...] = ()) -> None:
        self.current, self.loads, self.running = "base", list[str](), 0
        self.n_answers, self._restarts_after, self._broken = 0, restarts_after, broken
        self.app = create_app("fake", limits=Limits(), tokens=None, ready=lambda: None)
        self.app.add_api_route("/weights", self.weights, methods=["GET"])
        self.app.add_api_route("/update_weights_from_disk", self.load, methods=["POST"])
        self.app.add_api_route("/generate", self.generate, methods=["POST"])

    async def weights(self, request: Request) -> Response:
        return respond(request, {"current": self.current})

    async def load(self, request: Request) -> Response:
        body = await read_body(request)
        assert not self.running, "weights change while tokens are sampled"
        if body["weight_version"] in self._broken:
            raise WeightsError("no weights")
        self.current = body["weight_version"]
        self.loads.append(self.current)
        return respond(request, {"timings": {}})

    async def generate(self, request: Request) -> Response:
        self.running += 1
        version = self.current
        try:
            await asyncio.sleep(0.01)
        finally:  # the client leaves if another sample of its request fails
            self.running -= 1
        self.n_answers += 1
        if self.n_answers == self._restarts_after:
            self.current = "base"
            raise Unavailable("the server restarts")
        token = np.array([TOKENS[version]], np.int32)
        spans = [{"version": version, "start": 0, "end": 1}]
        meta = {"output_token_logprobs": np.array([-1.0], np.float32), "weight_versions": spans}
        return respond(request, {"output_ids": token, "meta_info": {**meta, "finish_reason": {"type": "stop"}}})


def checkpoint(name: str) -> Checkpoint:
    path = f"tinker://m/sampler_weights/{name}"
    return Checkpoint(path, "m", "sampler", name, name, name, 1, 0.0, None, public=False, spec={}, metadata=None)


WEIGHTS: dict[str, Checkpoint | None] = {"a": checkpoint("a"), "b": checkpoint("b"), "base": None}
TOKENS = {version_of(one): 7 + i for i, one in enumerate(WEIGHTS.values())}


async def answered(rollout: Rollout, wanted: list[str]) -> list[RequestResult]:
    """Ask for a sample of each of the weights, some at once and some later; return the results in order."""
    made: dict[str, RequestResult] = {}
    done = asyncio.Event()

    async def settle(future: Future, settlement: RequestResult) -> None:
        assert future.id not in made
        made[future.id] = settlement
        if len(made) == len(wanted):
            done.set()

    async def export(_checkpoint: Checkpoint | None, name: str) -> Path:
        return Path("/nowhere") / name

    async with HttpClient("http://rollout", transport=httpx.ASGITransport(rollout.app)) as client:
        server = SampleServer(client, 50, export, settle)
        worker = asyncio.ensure_future(server.run())
        for i, name in enumerate(wanted):
            body = orjson.dumps(PROMPT)
            server.add(SampleTask(Future(str(i), "s", i, "sample", body, "", None, None), WEIGHTS[name]))
            await asyncio.sleep(0.004 * (i % 3))
        async with asyncio.timeout(100):
            await done.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    return [made[str(i)] for i in range(len(wanted))]


def tokens(made: RequestResult) -> list[list[int]]:
    return [one["tokens"] for one in samples.to_json(made.result)["sequences"]]


@pytest.mark.parametrize("restarts_after", [10**9, 5])
async def test_each_sample_is_of_its_weights(restarts_after: int):
    rollout = Rollout(restarts_after)
    wanted = [*"aabba", "base", *"baab", "base", "base"]
    found = await answered(rollout, wanted)
    expected = {name: TOKENS[version_of(one)] for name, one in WEIGHTS.items()}
    assert [tokens(one) for one in found] == [[[expected[name]]] * 2 for name in wanted]
    assert len(rollout.loads) < len(wanted)


async def test_weights_that_cannot_be_loaded_fail_their_samples_only():
    found = await answered(Rollout(broken=(version_of(WEIGHTS["b"]),)), ["a", "b", "a", "b", "base"])
    assert [one.outcome for one in found] == ["done", "failed", "done", "failed", "done"]
