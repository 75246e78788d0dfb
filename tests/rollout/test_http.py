"""The HTTP face over a fake engine: formats, errors, readiness, drain."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.rollout.api.generation import ClientGone, GenerationRunner
from services.rollout.api.validation import CROWD
from services.rollout.app import build_app
from services.rollout.engines.base import ScoredTokens
from services.rollout.settings import from_config
from services.rollout.weights.serving import NothingServes, Serving
from services.rollout.weights.updater import WeightUpdater
from shared import codec
from shared.clients.rollout import RolloutClient
from shared.config import validate
from shared.errors import Conflict, InputError, Unavailable
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine, generate_request

VERSION = "e000001-s000000"
CONFIG = models.tiny_config()
MODEL = ModelConfig.parse(CONFIG)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version=VERSION)


@pytest.fixture
def updates(engine: FakeEngine, tmp_path: Path) -> WeightUpdater:
    return WeightUpdater(engine, tmp_path, MODEL, "test", state=Serving(VERSION))


@pytest.fixture
def generation(engine: FakeEngine, updates: WeightUpdater) -> GenerationRunner:
    return GenerationRunner(engine, grace_s=0.2, updates=updates)


@pytest.fixture
def transport(engine: FakeEngine, updates: WeightUpdater, generation: GenerationRunner) -> httpx.ASGITransport:
    return httpx.ASGITransport(build_app(SETTINGS, engine, updates, generation, None))


@pytest.fixture
async def http(transport: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def test_json_and_msgpack_carry_the_same_answer(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "rid": "a"}
    as_json = (await http.post("/generate", json=body)).json()
    packed = codec.pack(body | {"input_ids": np.array([5, 6], np.int32)})
    answer = await http.post("/generate", content=packed, headers={"Content-Type": codec.MEDIA_TYPE})
    as_msgpack = codec.unpack(answer.content)
    assert as_json["output_ids"] == as_msgpack["output_ids"].tolist() == [7, 8, 9]
    assert as_json["meta_info"]["output_token_logprobs"] == [[-0.5, t, None] for t in (7, 8, 9)]
    assert as_msgpack["meta_info"]["output_token_logprobs"].tolist() == [-0.5] * 3
    assert as_json["meta_info"]["weight_versions"] == [{"version": VERSION, "start": 0, "end": 3}]
    assert as_json["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert as_json["meta_info"]["id"] == "a"


async def test_given_tokens_are_scored_as_sglang_tells_it(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [40, 50, 60], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    texts = ["F", "P", "Z"]
    for start, rows in (
        (0, [[None, 40], [-0.25, 50], [-0.5, 60]]),
        (1, [[None, 50], [-0.5, 60]]),
        (2, [[None, 60]]),
    ):
        for with_texts in (False, True):
            asked = {**body, "logprob_start_len": start, "return_text_in_logprobs": with_texts}
            answer = (await http.post("/generate", json=asked)).json()
            told = texts[start:] if with_texts else [None] * len(rows)
            assert answer["meta_info"]["input_token_logprobs"] == [
                [*row, text] for row, text in zip(rows, told, strict=True)
            ]
            assert (answer["output_ids"], answer["meta_info"]["prompt_tokens"]) == ([], 3)


async def test_nothing_is_scored_while_requests_must_not_be_routed_here(
    http: httpx.AsyncClient, engine: FakeEngine, generation: GenerationRunner
) -> None:
    engine.silent_s = 100.0
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    assert (await http.post("/generate", json=body)).status_code == 503
    assert generation.n_requests == 0


async def test_log_probabilities_that_nobody_wants_are_not_sent(http: httpx.AsyncClient) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
    for wanted, there in ((False, False), (True, True), (None, True)):
        meta = (await http.post("/generate", json={**body, "return_logprob": wanted})).json()["meta_info"]
        assert ("output_token_logprobs" in meta) == there
    refused = await http.post("/generate", json={**body, "return_logprob": 7})
    assert (refused.status_code, refused.json()["detail"]) == (422, "return_logprob must be true or false, not 7")


@pytest.mark.parametrize(("given", "there"), [(None, False), (False, False), (0, True), (1, True), (True, True)])
async def test_openai_log_probabilities_come_when_they_are_asked_for(
    http: httpx.AsyncClient, given: object, there: bool
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2, "logprobs": given})
    assert (answer.json()["choices"][0]["logprobs"] is not None) == there
    if type(given) is not int:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": given}
        assert (
            (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"] is not None
        ) == there


@pytest.mark.parametrize(
    ("stop", "text", "n"),
    [
        ("C", "AB", 3),
        (["CD", "B"], "A", 2),
        (["", "z"], "ABCDEF", 6),
        ("A", "", 1),
        ("F", "ABCDE", 6),
        ("\n", "ABCDEF", 6),
    ],
)
async def test_a_stop_string_ends_text_tokens_and_log_probabilities_alike(
    http: httpx.AsyncClient, stop: object, text: str, n: int
) -> None:
    """The engine answers A (id 35), B, C, …; the token that completes the stop string is the last."""
    body = {"max_tokens": 6, "stop": stop, "logprobs": True}
    answer = (await http.post("/v1/completions", json={**body, "prompt": [34]})).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length" if text == "ABCDEF" else "stop")
    assert choice["token_ids"] == list(range(35, 35 + n))
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == n
    assert choice["weight_versions"] == [{"version": VERSION, "start": 0, "end": n}]
    assert answer["usage"]["completion_tokens"] == n
    chat = (
        await http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "hi"}]})
    ).json()["choices"][0]
    assert len(chat["logprobs"]["content"]) == len(chat["token_ids"])


async def test_the_projects_client_accepts_the_answers(transport: httpx.ASGITransport) -> None:
    async with RolloutClient("http://x", transport=transport) as client:
        generation = await client.generate(np.array([5, 6], np.int32), {"max_new_tokens": 4}, "r")
        assert generation.output_ids.tolist() == [7, 8, 9, 10]
        assert (await client.weights()).current == VERSION
        await client.abort("nothing")
        await client.ready()


async def test_text_is_tokenized_on_request(http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    assert answer.status_code == 200
    chat = await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}
    )
    assert len(chat.json()["choices"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", b"{", "not valid JSON"),
        ("/generate", b"[]", "must be an object"),
        ("/generate", b'{"text": "a", "input_ids": [5]}', "both"),
        ("/weights/stage", b"{}", "manifest"),
        ("/weights/commit", b'{"version": "v", "mode": "later"}', "mode 'later'"),
        ("/v1/chat/completions", b'{"messages": []}', "messages"),
        ("/v1/completions", b'{"prompt": [5], "stream": 1}', "stream"),
        ("/v1/completions", b'{"prompt": [5], "top_k": false}', "top_k"),
        ("/v1/completions", b'{"prompt": [5], "top_k": -2}', "top_k"),
        ("/v1/completions", b'{"prompt": [1e40]}', "prompt"),
        ("/v1/completions", b'{"prompt": [5], "logprobs": 21}', "logprobs"),
        ("/v1/completions", b'{"prompt": [5], "echo": true, "stream": true}', "echo=True is not supported"),
        ("/v1/completions", b'{"prompt": [5], "frequency_penalty": 0.5}', "frequency_penalty=0.5 is not supported"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "logprobs": 1}', "logprobs"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user"}], "top_logprobs": 21}',
            "top_logprobs",
        ),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user"}], "response_format": {"type": "json_object"}}',
            "response_format",
        ),
        ("/abort_request", b'{"abort_all": 1}', "abort_all must be true or false"),
        ("/abort_request", b"{}", "rid"),
    ],
)
async def test_wrong_bodies_are_problems_that_name_the_field(
    http: httpx.AsyncClient, path: str, body: bytes, named: str
) -> None:
    answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert named in answer.json()["detail"]
    if path.startswith("/v1/"):
        assert named in answer.json()["error"]["message"]


async def test_not_ready_until_weights_serve(http: httpx.AsyncClient, updates: WeightUpdater) -> None:
    updates.state = NothingServes()
    answer = await http.get("/ready")
    assert answer.status_code == 503
    assert "no weights are published" in answer.json()["detail"]
    updates.state = Serving(VERSION)
    assert (await http.get("/ready")).status_code == 200


async def test_metrics_and_schema_are_served(http: httpx.AsyncClient) -> None:
    await http.post("/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    assert "volley_rollout_tokens_total" in (await http.get("/metrics")).text
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {
        "/generate",
        "/weights/stage",
        "/update_weights_from_disk",
        "/v1/chat/completions",
        "/health",
    } <= paths.keys()


async def test_all_requests_can_be_aborted(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.hold = True
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(http.post("/generate", json={"input_ids": [5]})) for _ in range(3)]
        while len(engine.waiting) < 3:
            await asyncio.sleep(0)
        assert (await http.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 3}
    assert {task.result().json()["meta_info"]["finish_reason"]["type"] for task in held} == {"abort"}


async def test_a_client_that_goes_away_cancels_its_request(engine: FakeEngine, generation: GenerationRunner) -> None:
    engine.hold = True

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await generation.run([generate_request({"input_ids": [5]}, engine.info)], receive)
    assert not engine.waiting


async def test_a_text_whose_client_has_gone_is_not_scored(
    engine: FakeEngine, generation: GenerationRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, scored = asyncio.Event(), list[int]()

    async def held(ids: np.ndarray, _: int = 0) -> ScoredTokens:
        scored.append(len(ids))
        await first.wait()
        return ScoredTokens(engine.version or "", np.zeros(len(ids) - 1, np.float32))

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    monkeypatch.setattr(engine, "score", held)
    running = asyncio.ensure_future(generation.score(np.zeros(5, np.int32)))
    with pytest.raises(ClientGone):
        await generation.score(np.zeros(7, np.int32), receive)
    first.set()
    assert len((await running).logprobs) == 4
    assert scored == [5]
    assert generation.n_requests == 0


async def test_a_stopping_server_refuses_work_and_returns_what_it_has(
    engine: FakeEngine, generation: GenerationRunner
) -> None:
    engine.hold = True
    wanted = generate_request({"input_ids": [5]}, engine.info)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(generation.run([wanted]))
        drain = group.create_task(generation.drain())
        await asyncio.sleep(0.01)
        drain.cancel()
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="stopping"):
            await generation.run([replace(wanted, rid="late")])
    (result,) = running.result()
    assert (result.finish.type, len(result.output_ids)) == ("abort", 1)


async def test_a_stopping_server_waits_for_nothing_but_its_requests(engine: FakeEngine, updates: WeightUpdater) -> None:
    generation = GenerationRunner(engine, 3600.0, updates)
    engine.hold = True
    async with asyncio.TaskGroup() as group:
        running = group.create_task(generation.run([generate_request({"input_ids": [5]}, engine.info)]))
        drain = group.create_task(generation.drain())
        await asyncio.sleep(0.01)
        drain.cancel()
        await asyncio.wait({drain}, timeout=0.2)
        assert not running.done()
        assert not drain.done()
        await engine.abort(None)
        await asyncio.wait({drain}, timeout=10)
        assert running.done()
        assert drain.done()


async def test_a_crowd_beyond_the_bound_is_sent_away_and_forgotten(
    http: httpx.AsyncClient, engine: FakeEngine, generation: GenerationRunner
) -> None:
    engine.hold = True
    bound = CROWD * engine.info.max_running_requests
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(http.post("/generate", json={"input_ids": [5]})) for _ in range(bound)]
        while len(engine.waiting) < bound:
            await asyncio.sleep(0.01)
        refused = await http.post("/generate", json={"input_ids": [5]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert f"{bound} requests run or wait here" in refused.json()["detail"]
        for task in held[::2]:
            task.cancel()
        await engine.abort(None)
    assert (generation.n_requests, len(engine.waiting)) == (0, 0)
    engine.hold = False
    assert (await http.post("/generate", json={"input_ids": [5]})).status_code == 200


async def test_a_client_of_several_samples_that_goes_away_cancels_them_all(
    engine: FakeEngine, generation: GenerationRunner
) -> None:
    engine.hold = True

    async def receive() -> dict[str, str]:
        while len(engine.waiting) < 5:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await generation.run([generate_request({"input_ids": [5]}, engine.info) for _ in range(5)], receive)
    assert (generation.n_requests, len(engine.waiting)) == (0, 0)


async def test_one_failing_sample_ends_the_others(engine: FakeEngine, generation: GenerationRunner) -> None:
    engine.hold = True
    wanted = [generate_request({"input_ids": [5], "rid": rid}, engine.info) for rid in "ab"]
    with pytest.raises(Conflict, match="a request 'a' is running"):
        await generation.run([*wanted, wanted[0]])
    assert (generation.n_requests, len(engine.waiting)) == (0, 0)
    with pytest.raises(InputError, match=r"258 samples are requested, .* at most 256"):
        await generation.run(wanted * 129)


async def test_a_body_longer_than_any_prompt_is_not_read(http: httpx.AsyncClient) -> None:
    assert (await http.post("/generate", content=b" " * 300_000)).status_code == 413


async def test_a_silent_engine_gets_no_requests(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.silent_s = 7
    for answer in (await http.get("/ready"), await http.post("/generate", json={"input_ids": [5]})):
        assert answer.status_code == 503
        assert "the engine has been silent for 7 s" in answer.json()["detail"]


async def test_no_answer_leaves_that_wrong_weights_may_have_made(
    http: httpx.AsyncClient, engine: FakeEngine, updates: WeightUpdater
) -> None:
    """It began under good weights and ends after a commit that the engine did not carry out."""
    assert updates.root is not None
    engine.hold = engine.stubborn = True
    checkpoint = models.write_checkpoint(updates.root, "e000001-s000001", CONFIG, models.random_weights(CONFIG, 0))
    async with asyncio.TaskGroup() as group:
        held = group.create_task(http.post("/generate", json={"input_ids": [5]}))
        while not engine.waiting:
            await asyncio.sleep(0.01)
        update = await http.post("/update_weights", json={"manifest": str(checkpoint)})
        await engine.abort(None)
    assert (update.status_code, held.result().status_code) == (422, 503)
    assert "differs from the weights that were loaded" in held.result().json()["detail"]
    assert (await http.get("/weights")).json()["current"] is None
    assert (await http.get("/ready")).status_code == 503


def test_settings_come_from_the_runs_configuration(tmp_path: Path) -> None:
    models.write_hf(tmp_path, models.tiny_config())
    tree = {"model": {"path": str(tmp_path)}, "data": {"env": "x"}, "run": {"name": "r", "dir": "/runs"}}
    settings = from_config(validate(json.loads(json.dumps(tree))).config)
    assert settings.weights_root == Path("/runs/r/checkpoints")
    assert not settings.engine.load_weights
    assert settings.url == "http://127.0.0.1:8102"
