"""SGLang's /generate in front of the real engine: streams, stop strings, batches, log-probabilities of the prompt."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np

from tests.rollout.server import MAX_RUNNING, RolloutProcess
from tests.support import decoder_reference

GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def ask(server: RolloutProcess, **fields: Any) -> Any:
    return server.http.post("/generate", json=fields).raise_for_status().json()


def events(server: RolloutProcess, **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", "/generate", json={**fields, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_ends_with_the_answer_of_the_same_request(server: RolloutProcess, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], "sampling_params": GREEDY}
    whole, parts = ask(server, **body), events(server, **body)
    assert len(parts) > 3
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["text"] == whole["text"]
    logprobs = [[row[0] for row in one["meta_info"]["output_token_logprobs"]] for one in (whole, parts[-1])]
    assert np.allclose(*logprobs, atol=1e-4)
    for before, after in pairwise(parts):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])


def test_a_stop_string_ends_decoding(server: RolloutProcess, prompts: list[list[int]]) -> None:
    whole = ask(server, input_ids=prompts[1], sampling_params={**GREEDY, "max_new_tokens": 200})
    middle = len(whole["text"]) // 4
    stop = whole["text"][middle : middle + 3]
    before, n_samples = server.status()["output_tokens"], 3 * MAX_RUNNING
    stopping = {**GREEDY, "max_new_tokens": 200, "stop": [stop], "n": n_samples}
    found, *_ = ask(server, input_ids=prompts[1], sampling_params=stopping)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    n = len(found["output_ids"])
    assert found["output_ids"] == whole["output_ids"][:n]
    assert n < 100
    assert server.status()["output_tokens"] - before < n_samples * 180  # a slow machine is told late of the first ones


def test_a_batch_is_each_of_its_prompts(server: RolloutProcess, prompts: list[list[int]]) -> None:
    batch = ask(server, input_ids=prompts[:3], sampling_params=GREEDY)
    for one, prompt in zip(batch, prompts, strict=False):
        assert one["output_ids"] == ask(server, input_ids=prompt, sampling_params=GREEDY)["output_ids"]
    samples = ask(server, input_ids=prompts[0], sampling_params={"n": 3, "max_new_tokens": 12, "sampling_seed": 5})
    assert len({tuple(one["output_ids"]) for one in samples}) == 3


def test_prompt_and_continuation_are_scored_in_one_request(server: RolloutProcess, prompts: list[list[int]]) -> None:
    prompt = prompts[2]
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    meta = ask(server, input_ids=prompt, sampling_params=GREEDY, **fields)["meta_info"]
    weights = server.weights[meta["weight_version"]]
    expected = decoder_reference.score(weights, server.config, prompt[:1], prompt[1:])
    found = [row[0] for row in meta["input_token_logprobs"][1:]]
    assert np.abs(expected - found).max() < 1e-4
    assert [row[1] for row in meta["input_token_logprobs"]] == prompt
    for row, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0] == row
        assert len(top) == 3
