"""/generate over a fake engine: a run's own requests, with and without the package of SGLang's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared import codec, packages
from shared.clients.rollout import RolloutClient
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine

VERSION = "e000001-s000000"
IDS = np.array([40, 50, 60], np.int32)
SCORING = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 1}
ABSENT = "it belongs to the package volley-rl-serving, which is not installed"


@pytest.fixture(params=[False, True], ids=["core", "package"])
def has_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(packages, "found", lambda group: {})
    return request.param


@pytest.fixture
def transport(has_package: bool, tmp_path: Path) -> httpx.ASGITransport:
    engine = FakeEngine(version=VERSION)
    updates = WeightUpdater(engine, tmp_path, ModelConfig.parse(models.tiny_config()), "test", state=Serving(VERSION))
    return httpx.ASGITransport(build_app(SETTINGS, engine, updates, GenerationRunner(engine, 0.2, updates), None))


@pytest.fixture
async def http(transport: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await http.post("/generate", content=codec.pack(body), headers={"Content-Type": codec.MEDIA_TYPE})


async def test_a_runs_own_client_is_answered(transport: httpx.ASGITransport) -> None:
    async with RolloutClient("http://x", transport=transport) as client:
        sampling = {"max_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_token_ids": [7]}
        found = await client.generate(IDS, {**sampling, "sampling_seed": 3}, "r", routed_from=0)
        assert (found.output_ids.tolist(), found.logprobs.tolist(), found.finish_reason) == (
            [61, 62],
            [-0.5] * 2,
            "length",
        )
        assert (await client.score(IDS, 1)).logprobs.tolist() == [-0.25, -0.5]
        assert (await client.load()).max_running > 0


async def test_the_tokens_of_a_prompt_are_scored_from_a_position_on(http: httpx.AsyncClient) -> None:
    assert (await ask(http, SCORING)).content == codec.pack(
        {
            "output_ids": [],
            "meta_info": {
                "prompt_tokens": 3,
                "completion_tokens": 0,
                "cached_tokens": 0,
                "output_token_logprobs": [],
                "input_token_logprobs": [[None, 50, None], [-0.5, 60, None]],
                "finish_reason": {"type": "length", "length": 0},
                "weight_versions": [],
                "weight_version": VERSION,
            },
        }
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"input_ids": np.array([600], np.int32)}, "outside the vocabulary"),
        ({"input_ids": np.zeros(0, np.int32)}, "input_ids is empty"),
        ({"rid": 5}, "rid must be a string"),
        ({"return_logprob": 7}, "return_logprob must be true or false, not 7"),
        ({"return_routed_experts": True, "routed_experts_start_len": 4}, "routed_experts_start_len must be"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"sampling_params": {"max_new_tokens": 400}}, "maximum context length is 255 tokens"),
        ({**SCORING, "logprob_start_len": 3}, "logprob_start_len must be an integer from 0 to 2"),
        ({**SCORING, "return_routed_experts": True}, "return_routed_experts needs sampled tokens"),
        ({**SCORING, "return_logprob": False}, "without return_logprob requests nothing"),
        ({**SCORING, "sampling_params": {"max_new_tokens": 0, "temperature": 0.7}}, "scored at temperature 1"),
    ],
)
async def test_a_wrong_value_is_named(http: httpx.AsyncClient, changed: dict[str, Any], named: str) -> None:
    answer = await ask(http, {"input_ids": IDS, **changed})
    assert answer.status_code in (400, 422)
    assert named in answer.json()["detail"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"text": "F"}, "text"),
        ({"stream": True}, "stream"),
        ({"input_ids": [[40]]}, "input_ids that are not an array"),
        ({"sampling_params": [{}]}, "sampling_params that are not an object"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"logprob_start_len": 0, "sampling_params": {}}, "logprob_start_len beside sampled tokens"),
    ],
)
@pytest.mark.parametrize("has_package", [False], indirect=True)
async def test_what_only_sglangs_clients_send_needs_its_package(
    http: httpx.AsyncClient, changed: dict[str, Any], named: str
) -> None:
    answer = await ask(http, {"input_ids": IDS, **changed})
    assert (answer.status_code, answer.json()["detail"]) == (422, f"{named}: {ABSENT}")
    as_json = await http.post("/generate", json={"input_ids": [40]})
    assert (as_json.status_code, as_json.json()["detail"]) == (422, f"a body in JSON: {ABSENT}")
    assert as_json.json()["error"] == {"message": as_json.json()["error"]["message"]}
    chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "F"}]})
    assert (chat.status_code, "error" in chat.json()) == (404, False)
    assert (await http.post("/pause_generation")).status_code == 404
