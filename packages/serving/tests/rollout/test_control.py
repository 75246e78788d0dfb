"""SGLang's routes of control and information over a fake engine, as its routers and other trainers call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.clients.rollout import RolloutClient
from shared.models.config import ModelConfig
from shared.web.access import AccessTokens, Role
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine
from volley_serving.sglang.control import REFUSED

VERSION = "e000001-s000000"
CONFIG = models.tiny_config()
F = 40


@dataclass
class RecordingEngine(FakeEngine):
    """`calls`: control calls in order."""

    calls: list[str] = field(default_factory=list[str])

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def flush_cache(self) -> None:
        self.calls.append("flush")

    async def abort(self, rid: str | None) -> int:
        self.calls.append(f"abort {rid}")
        return await super().abort(rid)


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine(version=VERSION)


@pytest.fixture
def updates(engine: RecordingEngine, tmp_path: Path) -> WeightUpdater:
    return WeightUpdater(engine, tmp_path, ModelConfig.parse(CONFIG), "test", state=Serving(VERSION))


def client(engine: FakeEngine, updates: WeightUpdater, tokens: AccessTokens | None = None) -> httpx.AsyncClient:
    app = build_app(SETTINGS, engine, updates, GenerationRunner(engine, 0.2, updates), tokens)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


@pytest.fixture
async def http(engine: RecordingEngine, updates: WeightUpdater) -> AsyncIterator[httpx.AsyncClient]:
    async with client(engine, updates) as found:
        yield found


async def test_health_needs_no_token_and_shows_whether_to_route_here(
    engine: RecordingEngine, updates: WeightUpdater
) -> None:
    async with client(engine, updates, AccessTokens({Role.ADMIN: "a" * 16})) as http:
        assert (await http.get("/health_generate")).status_code == 200
        assert (await http.get("/v1/loads")).status_code == 401
        engine.silent_s = 100.0
        assert (await http.get("/health_generate")).status_code == 503


async def test_routes_without_a_body_take_the_defaults_of_sglang(
    http: httpx.AsyncClient, engine: RecordingEngine
) -> None:
    for path in ("/pause_generation", "/continue_generation", "/flush_cache", "/resume_memory_occupation"):
        assert (await http.post(path)).status_code == 200
    assert (await http.get("/flush_cache")).status_code == 200
    assert (await http.post("/continue_generation", json={"torch_empty_cache": True})).status_code == 200
    assert engine.calls == ["pause", "abort None", "resume", "flush", "flush", "resume"]


@pytest.mark.parametrize(("mode", "calls"), [("in_place", []), ("retract", ["flush"]), ("abort", ["abort None"])])
async def test_a_pause_has_the_mode_of_the_request(
    http: httpx.AsyncClient, engine: RecordingEngine, mode: str, calls: list[str]
) -> None:
    assert (await http.post("/pause_generation", json={"mode": mode})).status_code == 200
    assert engine.calls == ["pause", *calls]


async def test_the_server_describes_itself(http: httpx.AsyncClient) -> None:
    model = (await http.get("/model_info")).json()
    assert model == (await http.get("/get_model_info")).json()
    assert (model["served_model_name"], model["model_type"]) == ("tiny", "qwen3")
    assert model["architectures"] == ["Qwen3ForCausalLM"]
    assert model["weight_version"] == VERSION
    assert (await http.get("/get_weight_version")).json() == {"weight_version": VERSION}
    server, again = [(await http.get(path)).json() for path in ("/server_info", "/get_server_info")]
    assert server.pop("host_memory").keys() == again.pop("host_memory").keys()  # its figures change all the time
    assert server == again
    assert (server["tp_size"], server["dp_size"], server["disaggregation_mode"]) == (1, 1, "null")
    assert server["internal_states"] == [server["internal_state"]]


async def test_slimes_external_engine_in_the_order_of_its_requests(
    http: httpx.AsyncClient, engine: RecordingEngine, export: str
) -> None:
    """Requests of `--rollout-external-engine-addrs`, in order: discovery, generation, abort, weights from disk."""
    info = (await http.get("/server_info")).json()
    expected = {"enable_memory_saver": False}  # what it compares with its own settings, without --offload-rollout
    assert {name: info.get(name) for name in expected} == expected
    assert (info["tp_size"] * info["pp_size"], info["ep_size"]) == (1, 1)
    assert (await http.get("/health_generate")).status_code == 200
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 2, "stop": None, "no_stop_trim": True}
    body = {"input_ids": [F], "sampling_params": sampling, "return_logprob": True}
    answer = (await http.post("/generate", json=body)).json()
    assert [row[1] for row in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
    assert (await http.get("/v1/loads?include=core")).json()["loads"][0]["num_total_reqs"] == 0
    assert (await http.post("/pause_generation", json={})).status_code == 200
    assert (await http.get("/flush_cache")).status_code == 200
    update = {"model_path": export, "weight_version": "3"}
    assert (await http.post("/update_weights_from_disk", json=update)).json()["success"] is True
    assert (await http.get("/get_weight_version")).json()["weight_version"] == "3"
    assert (await http.post("/continue_generation", json={})).status_code == 200
    assert engine.calls[-1] == "resume"


async def test_the_load_counts_requests(http: httpx.AsyncClient, engine: RecordingEngine) -> None:
    (load,) = (await http.get("/v1/loads?include=core,disagg,queues")).json()["loads"]
    assert {load[name] for name in load if name.endswith("_reqs")} == {0}
    assert (await http.get("/get_load")).json()[0]["num_reqs"] == 0


@pytest.mark.parametrize("path", REFUSED)
async def test_a_route_that_is_not_supported_says_why(http: httpx.AsyncClient, path: str) -> None:
    for answer in (await http.post(path, json={"tags": ["weights"]}), await http.get(path)):
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(f"{path} is not supported: ")
        assert answer.json()["hint"]


@pytest.fixture
def export(tmp_path: Path) -> str:
    return str(models.write_hf(tmp_path / "export", CONFIG, models.random_weights(CONFIG, 1)))


async def test_weights_from_disk_get_the_version_of_the_request(
    http: httpx.AsyncClient, engine: RecordingEngine, export: str
) -> None:
    for body, version in (({}, "export"), ({"weight_version": "7"}, "7"), ({"weight_version": "8"}, "8")):
        answer = await http.post("/update_weights_from_disk", json={"model_path": export, **body})
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert (await http.get("/get_weight_version")).json()["weight_version"] == version
    assert engine.loaded == ["export", "7", "8"]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "retract"),
        ({"abort_all_requests": True}, "abort"),
        ({"flush_cache": False}, "in_place"),
        ({"mode": "in_place", "abort_all_requests": True}, "in_place"),
    ],
)
async def test_flags_of_an_update_are_its_mode(
    http: httpx.AsyncClient, engine: RecordingEngine, export: str, flags: dict[str, Any], mode: str
) -> None:
    neutral = {"load_format": "auto", "is_async": False, "torch_empty_cache": True, "token_step": 0}
    body = {"model_path": export, **neutral, **flags}
    assert (await http.post("/update_weights_from_disk", json=body)).status_code == 200
    assert engine.modes == [mode]


async def test_an_update_may_leave_decoding_paused(
    http: httpx.AsyncClient, engine: RecordingEngine, export: str
) -> None:
    body = {"model_path": export, "keep_pause": True}
    assert (await http.post("/update_weights_from_disk", json=body)).status_code == 200
    assert engine.calls == ["pause"]


async def test_a_refused_update_does_not_leave_decoding_paused(
    http: httpx.AsyncClient, engine: RecordingEngine
) -> None:
    body = {"model_path": "missing", "keep_pause": True}
    assert (await http.post("/update_weights_from_disk", json=body)).status_code >= 400
    assert engine.calls == ["pause", "resume"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"load_format": "dummy"}, "load_format='dummy' is not supported"),
        ({"is_async": True}, "is_async=True is not supported"),
        ({"weight_version": "e000001-s000009"}, "e000001-s000009 is a version name"),
        ({"weight_version": 7}, "weight_version must be"),
        ({"abort_all_requests": 1}, "abort_all_requests must be"),
        ({"path": "x"}, "unknown field path"),
        ({"model_path": ""}, "model_path must be"),
    ],
)
async def test_a_wrong_update_is_refused_by_name(
    http: httpx.AsyncClient, export: str, fields: dict[str, Any], named: str
) -> None:
    answer = await http.post("/update_weights_from_disk", json={"model_path": export, **fields})
    assert answer.status_code == 422
    assert named in answer.json()["detail"]


async def test_the_orchestrator_reads_the_load_that_the_server_reports(http: httpx.AsyncClient) -> None:
    info = (await http.get("/get_server_info")).json()
    client = RolloutClient(str(http.base_url), transport=http._transport)
    async with client:
        load = await client.load()
    assert (load.running, load.queued, load.max_running) == (0, 0, info["max_running_requests"])
    assert load.free_kv == info["internal_state"]["free_kv_tokens"] / info["max_total_tokens"]
