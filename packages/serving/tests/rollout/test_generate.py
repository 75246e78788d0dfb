"""SGLang's /generate over a fake engine: texts, batches, samples, stop strings, streams, lists of log-probabilities.

The fake engine continues with the last token plus one: after token 40 ("F") come 41 ("G"), 42 ("H"), …
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared import codec
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine

VERSION = "e000001-s000000"
F = 40


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version=VERSION)


@pytest.fixture
async def http(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(engine, tmp_path) as client:
        yield client


@asynccontextmanager
async def served(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    updates = WeightUpdater(engine, tmp_path, ModelConfig.parse(models.tiny_config()), "test", state=Serving(VERSION))
    app = build_app(SETTINGS, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


async def ask(http: httpx.AsyncClient, *, status: int = 200, **fields: Any) -> Any:
    answer = await http.post("/generate", json=fields)
    assert answer.status_code == status, answer.text
    return answer.json()


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    async with http.stream("POST", "/generate", json={**fields, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_text_is_answered_with_text_and_ids(http: httpx.AsyncClient) -> None:
    found = await ask(http, text="F", sampling_params={"max_new_tokens": 3})
    assert (found["text"], found["output_ids"]) == ("GHI", [41, 42, 43])
    same = await ask(http, input_ids=[F], sampling_params={"max_new_tokens": 3})
    assert (same["text"], same["output_ids"]) == ("GHI", [41, 42, 43])
    assert found["meta_info"]["prompt_tokens"] == 1


async def test_msgpack_answers_have_arrays_and_no_text(http: httpx.AsyncClient) -> None:
    body = {"input_ids": np.array([F], np.int32), "sampling_params": {"max_new_tokens": 2}, "rid": "a"}
    answer = await http.post("/generate", content=codec.pack(body), headers={"Content-Type": codec.MEDIA_TYPE})
    spans = [{"version": VERSION, "start": 0, "end": 2}]
    expected = {
        "output_ids": np.array([41, 42], np.int32),
        "meta_info": {
            "id": "a",
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "output_token_logprobs": np.full(2, -0.5, np.float32),
            "finish_reason": {"type": "length", "length": 2},
            "weight_versions": spans,
            "weight_version": VERSION,
        },
    }
    assert answer.content == codec.pack(expected)


async def test_a_batch_is_answered_in_order(http: httpx.AsyncClient) -> None:
    found = await ask(
        http,
        text=["F", "P"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid=["a", "b"],
        return_logprob=[True, False],
    )
    assert [one["output_ids"] for one in found] == [[41], [51, 52]]
    assert [one["meta_info"]["id"] for one in found] == ["a", "b"]
    assert ["output_token_logprobs" in one["meta_info"] for one in found] == [True, False]
    (one,) = await ask(http, input_ids=[[F]], sampling_params={"max_new_tokens": 1}, rid="x")
    assert (one["output_ids"], one["meta_info"]["id"]) == ([41], "x_0")


async def test_samples_of_a_prompt_stand_together(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    seeds = list[int | None]()
    engine.draw = lambda request: seeds.append(request.sampling.sampling_seed) or request.input_ids + 1
    found = await ask(http, input_ids=[[F], [50]], sampling_params={"n": 2, "sampling_seed": 7}, rid="r")
    assert [one["output_ids"] for one in found] == [[41], [41], [51], [51]]
    assert [one["meta_info"]["id"] for one in found] == ["r_0", "r_1", "r_2", "r_3"]
    assert seeds == [7, 8, 7, 8]
    assert len(await ask(http, text="F", sampling_params={"n": 2})) == 2


async def test_a_stop_string_ends_decoding(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay_s = 0.05
    stop = {"max_new_tokens": 100, "stop": ["zz", "IJ"]}
    found = await ask(http, text="F", sampling_params=stop)
    assert (found["text"], found["output_ids"]) == ("GH", [41, 42, 43, 44])
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "IJ"}
    assert found["meta_info"]["completion_tokens"] == 4
    assert found["meta_info"]["weight_versions"] == [{"version": VERSION, "start": 0, "end": 4}]
    assert len(found["meta_info"]["output_token_logprobs"]) == 4
    assert engine.n_sampled < 20, "the engine went on after the stop string"
    kept = await ask(http, text="F", sampling_params={**stop, "no_stop_trim": True})
    assert (kept["text"], len(kept["output_ids"])) == ("GHIJ", 4)
    assert (await ask(http, text="F", sampling_params={"max_new_tokens": 2, "stop": ""}))["text"] == "GH"


async def test_the_token_that_ends_an_answer_is_no_text(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.draw = lambda request: np.array([F, 2], np.int32)
    answers = [
        await ask(http, input_ids=[5], sampling_params=sampling)
        for sampling in (
            {},
            {"no_stop_trim": True, "skip_special_tokens": False},
            {"skip_special_tokens": False},
            {"stop": "x"},
        )
    ]
    assert [one["output_ids"] for one in answers] == [[F, 2]] * 4
    assert [one["text"] for one in answers] == ["F", "F<|im_end|>", "F", "F"]
    assert {json.dumps(one["meta_info"]["finish_reason"]) for one in answers} == {'{"type": "stop", "matched": 2}'}


async def test_a_stream_has_everything_so_far_in_each_event(http: httpx.AsyncClient) -> None:
    found = await events(http, text="F", sampling_params={"max_new_tokens": 3}, rid="a")
    assert [one["text"] for one in found] == ["G", "GH", "GHI", "GHI"]
    assert [one["output_ids"] for one in found] == [[41], [41, 42], [41, 42, 43], [41, 42, 43]]
    assert [one["meta_info"]["completion_tokens"] for one in found] == [1, 2, 3, 3]
    assert [one["meta_info"]["finish_reason"] for one in found] == [None] * 3 + [{"type": "length", "length": 3}]
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in found] == [1, 2, 3, 3]
    assert {one["meta_info"]["id"] for one in found} == {"a"}
    assert found[-1] == await ask(http, text="F", sampling_params={"max_new_tokens": 3}, rid="a")


async def test_a_stream_holds_back_what_may_be_a_stop_string(http: httpx.AsyncClient) -> None:
    found = await events(http, text="F", sampling_params={"max_new_tokens": 50, "stop": "IJ"})
    assert [one["text"] for one in found] == ["G", "GH", "GH", "GH"]
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "IJ"}
    assert found[-1]["output_ids"] == [41, 42, 43, 44]


async def test_a_batch_streams_with_the_number_of_each_answer(http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 4, "stream_interval": 2}
    found = await events(http, input_ids=[[F], [50]], sampling_params=sampling, return_logprob=False)
    assert sorted((one["index"], one["text"]) for one in found) == [
        (0, "GH"),
        (0, "GHIJ"),
        (0, "GHIJ"),
        (1, "QR"),
        (1, "QRST"),
        (1, "QRST"),
    ]
    assert not any("output_token_logprobs" in one["meta_info"] for one in found)


async def test_an_error_before_the_first_event_is_a_problem(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.silent_s = 100.0
    body = {"text": "F", "stream": True}
    assert (await http.post("/generate", json=body)).status_code == 503


async def test_prompt_and_continuation_have_log_probabilities_in_one_answer(http: httpx.AsyncClient) -> None:
    found = await ask(
        http,
        input_ids=[40, 50, 60],
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = found["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 50, "P"], [-0.5, 60, "Z"]]
    assert meta["output_token_logprobs"] == [[-0.5, 61, "["]]
    assert (len(meta["input_top_logprobs"]), meta["input_top_logprobs"][0]) == (2, None)
    assert [len(rows) for rows in meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]] == [2, 2]
    assert meta["output_top_logprobs"][0][0][1] == 61


async def test_prompts_of_a_batch_are_scored(http: httpx.AsyncClient) -> None:
    """As lm-eval's `sglang-generate` asks for multiple choice."""
    found = await ask(
        http,
        input_ids=[[40, 50], [50, 60, 70]],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=1,
        logprob_start_len=0,
    )
    assert [len(one["meta_info"]["input_token_logprobs"]) for one in found] == [2, 3]
    assert [len(one["meta_info"]["input_top_logprobs"]) for one in found] == [2, 3]
    assert [one["output_ids"] for one in found] == [[], []]


async def test_what_routers_and_trainers_add_is_accepted(http: httpx.AsyncClient) -> None:
    router = {"model": None, "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False}
    slime = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 2,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    areal = {"top_k": 10**8, "frequency_penalty": 0.0, "ignore_eos": False, "stop": ["\n\n"], "max_new_tokens": 2}
    for sampling in (slime, areal):
        body = {"input_ids": [F], "sampling_params": sampling, "return_logprob": True, "image_data": None, **router}
        assert (await ask(http, **body))["text"] == "GH"
    assert (await ask(http, input_ids=[F], return_prompt_token_ids=True))["prompt_token_ids"] == [F]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": ""}, "text must be"),
        ({"text": ["F", 5]}, "text must be"),
        ({"text": []}, "text must be"),
        ({"text": "F", "input_ids": [F]}, "text and input_ids are both given"),
        ({"input_ids": [[F], 5]}, "list of such lists"),
        ({"input_ids": [[F], []]}, "input_ids is empty"),
        ({"input_ids": [[F]], "rid": ["a", "b"]}, "rid must hold"),
        ({"input_ids": [[F], [F]], "rid": ["a", "a"]}, "rid must hold"),
        ({"input_ids": [[F], [F]], "sampling_params": [{}]}, "sampling_params has 1 values, but there are 2 prompts"),
        ({"input_ids": [[F], [F]], "sampling_params": [{"n": 1}, {"n": 2}]}, "n differs"),
        ({"input_ids": [[F], [F]], "lora_path": [None, "x"]}, "lora_path='x' is not supported"),
        ({"input_ids": [F], "lora_path": [None]}, "lora_path"),
        ({"text": "F", "sampling_params": {"n": 0}}, "n must be an integer from 1 to 128"),
        ({"text": "F", "sampling_params": {"stop": [5]}}, "stop must be"),
        ({"text": "F", "sampling_params": {"stop": ["a"] * 65}}, "stop has 65 texts"),
        ({"text": "F", "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "custom_params"),
        ({"text": "F", "sampling_params": {"stream_interval": 0}}, "stream_interval"),
        ({"text": "F", "stream": "yes"}, "stream must be true or false"),
        ({"text": "F", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "F", "return_entropy": True}, "return_entropy=True is not supported"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    for stream in ({}, {"stream": True}):
        assert named in (await ask(http, status=422, **{**stream, **fields}))["detail"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/generate", {"input_ids": [[1]] * 4000, "sampling_params": {"n": 128, "max_new_tokens": 1}}),
     ("/v1/completions", {"prompt": [[1]] * 4000, "n": 128})],
)  # fmt: skip
async def test_too_many_samples_are_refused_before_they_are_built(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    tracemalloc.start()
    try:
        answer = await http.post(path, json=fields)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (answer.status_code, engine.n_requests) == (422, 0)
    assert most_bytes < 50_000_000  # 512,000 requests are more
