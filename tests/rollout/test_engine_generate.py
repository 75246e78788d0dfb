"""The real engine against a float64 reference: ids, log-probabilities, sampling, aborts."""

import contextlib
import socket
import time
from collections import Counter
from concurrent.futures import wait

import numpy as np
import orjson
import pytest

from tests.rollout.server import MAX_PREFILL, MAX_RUNNING, RolloutProcess, wait_until
from tests.support import decoder_reference


def test_concurrent_requests_agree_with_the_reference(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """Fails with the engine's overlapped loop, whose next step overwrites the indices that the running one reads."""
    answers = [f.result() for f in [server.start(p, 24) for p in prompts]]
    assert max(server.error(p, a) for p, a in zip(prompts, answers, strict=True)) <= 1e-4
    weights = server.weights[server.get("/weights")["current"]]
    for prompt, answer in zip(prompts[:4], answers, strict=False):
        assert answer["output_ids"].tolist() == decoder_reference.greedy(weights, server.config, prompt, 24)


def test_a_prompt_longer_than_one_prefill_is_exact(server: RolloutProcess) -> None:
    prompt = np.random.default_rng(1).integers(3, 500, 3 * MAX_PREFILL + 5).tolist()
    assert server.error(prompt, server.generate(prompt, 8)) <= 1e-4


def test_given_tokens_are_scored_beside_running_requests(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """A teacher's answers: texts of one prefill and of several, while others generate."""
    running = [server.start(p, 24) for p in prompts]
    long = np.random.default_rng(2).integers(3, 500, 2 * MAX_PREFILL + 5).tolist()
    for ids, start in ((prompts[0], 0), (prompts[1], 3), (long, len(long) - 40)):
        sampling = {"max_new_tokens": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}
        meta = server.post("/generate", body)["meta_info"]
        rows = meta["input_token_logprobs"]
        assert [row[1] for row in rows] == ids[start:]
        assert rows[0][0] is None
        weights = server.weights[meta["weight_version"]]
        expected = decoder_reference.score(weights, server.config, ids[: start + 1], ids[start + 1 :])
        np.testing.assert_allclose([row[0] for row in rows[1:]], expected, atol=1e-4)
    answers = [future.result() for future in running]
    assert max(server.error(p, a) for p, a in zip(prompts, answers, strict=True)) <= 1e-4


def test_a_long_answer_has_each_token_once(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """The engine repeats log-probabilities of answers beyond 50 tokens."""
    answer = server.generate(prompts[0], 170)
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == 170
    assert server.error(prompts[0], answer) <= 1e-4


def test_the_stop_token_is_returned_as_sampled(server: RolloutProcess, prompts: list[list[int]]) -> None:
    free = server.generate(prompts[1], 12)["output_ids"].tolist()
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    for ignore_eos in (False, True):
        answer = server.generate(prompts[1], 12, stop_token_ids=[stop], ignore_eos=ignore_eos)
        assert answer["output_ids"].tolist() == free[: free.index(stop) + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_json_has_sglangs_rows(server: RolloutProcess, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
    answer = server.http.post("/generate", json=body).json()
    assert [row[1] for row in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_logprobs_are_at_the_requests_temperature(server: RolloutProcess, prompts: list[list[int]]) -> None:
    answer = server.generate(prompts[2], 12, temperature=0.7, sampling_seed=3)
    ids = answer["output_ids"].tolist()
    weights = server.weights[answer["meta_info"]["weight_versions"][0]["version"]]
    expected = decoder_reference.score(weights, server.config, prompts[2], ids, temperature=0.7)
    np.testing.assert_allclose(answer["meta_info"]["output_token_logprobs"], expected, atol=1e-4)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(server: RolloutProcess, prompts: list[list[int]]) -> None:
    alone = [
        server.generate(p, 24, temperature=1.0, sampling_seed=i)["output_ids"].tolist()
        for i, p in enumerate(prompts[:4])
    ]
    crowd = [server.start(p, 24, temperature=1.0, sampling_seed=i) for i, p in enumerate(prompts)]
    assert [f.result()["output_ids"].tolist() for f in crowd[:4]] == alone


def test_without_a_seed_and_with_another_the_draw_differs(server: RolloutProcess, prompts: list[list[int]]) -> None:
    seeded = [server.generate(prompts[0], 24, temperature=1.0, sampling_seed=s)["output_ids"].tolist() for s in (1, 2)]
    free = [server.generate(prompts[0], 24, temperature=1.0)["output_ids"].tolist() for _ in range(2)]
    assert len({tuple(ids) for ids in seeded + free}) == 4


def test_first_tokens_follow_the_models_distribution(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """χ² of 1,600 draws with consecutive seeds; the engine's own seeded sampler gives 15.7 a degree of freedom. Which
    weights serve depends on the order of tests: of a right sampler one order in a million gives 2.5.
    """
    draws = [server.start(prompts[0], 1, temperature=1.0, sampling_seed=s) for s in range(1600)]
    wait(draws)
    counts = Counter(int(f.result()["output_ids"][0]) for f in draws)
    weights = server.weights[server.get("/weights")["current"]]
    p = np.exp(decoder_reference.log_softmax(decoder_reference.logits(weights, server.config, prompts[0])[-1]))
    often = np.flatnonzero(p * len(draws) >= 5)
    expected = np.append(p[often], 1 - p[often].sum()) * len(draws)
    observed = np.array([*(counts[int(t)] for t in often), len(draws) - sum(counts[int(t)] for t in often)])
    assert ((observed - expected) ** 2 / expected).sum() / len(often) < 2.5


def test_aborting_one_request_spares_the_one_its_id_begins(server: RolloutProcess, prompts: list[list[int]]) -> None:
    doomed, spared = server.start(prompts[0], 200, rid="job-1"), server.start(prompts[1], 200, rid="job-10")
    wait_until(lambda: server.status()["running"] == 2)
    assert server.post("/abort_request", {"rid": "job-1"}) == {"aborted": 1}
    answer = doomed.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 200
    assert server.error(prompts[0], answer) <= 1e-4
    assert len(spared.result()["output_ids"]) == 200
    assert server.post("/abort_request", {"rid": "job-1"}) == {"aborted": 0}


def test_clients_that_disconnect_free_their_requests(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """There are three times as many as run at once, so that some are left when the engine is paused."""
    body = orjson.dumps({"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 210, "ignore_eos": True}})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address, before = ("127.0.0.1", int(server.url.rpartition(":")[2])), server.status()["output_tokens"]
    with contextlib.ExitStack() as clients:
        for _ in range(3 * MAX_RUNNING):
            clients.enter_context(socket.create_connection(address)).sendall(head.encode() + body)
        wait_until(lambda: server.status()["output_tokens"] > before)
        server.post("/pause_generation", {"mode": "in_place"})
        paused = server.status()
        assert paused["running"] > 0
    wait_until(lambda: (status := server.status())["running"] == status["queued"] == 0)
    server.post("/continue_generation", {})
    more = server.status()["output_tokens"] - paused["output_tokens"]
    assert more <= paused["running"]  # of a step that was running at the pause


def test_repeated_prompts_come_from_the_cache(server: RolloutProcess) -> None:
    prompt = np.random.default_rng(99).integers(3, 500, 30).tolist()
    first, second = server.generate(prompt, 4), server.generate(prompt, 4)
    assert (first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]) == (0, 29)
    assert second["output_ids"].tolist() == first["output_ids"].tolist()


def test_a_prompt_that_waiting_requests_share_is_computed_once(server: RolloutProcess) -> None:
    rng = np.random.default_rng(98)
    prompts = [rng.integers(3, 500, 40).tolist() for _ in range(2)]
    expected = [server.generate(prompt, 6)["output_ids"].tolist() for prompt in prompts]
    server.post("/flush_cache", {})
    server.post("/pause_generation", {"mode": "retract"})
    started = [server.start(prompts[i % 2], 6) for i in range(8)]
    wait_until(lambda: server.status()["queued"] == 8)
    server.post("/continue_generation", {})
    answers = [future.result() for future in started]
    assert Counter(answer["meta_info"]["cached_tokens"] for answer in answers) == {0: 2, 39: 6}
    for i, answer in enumerate(answers):
        assert answer["output_ids"].tolist() == expected[i % 2]
        assert server.error(prompts[i % 2], answer) <= 1e-4


def test_nobody_waits_for_a_prompt_that_is_cached(server: RolloutProcess) -> None:
    prompt = np.random.default_rng(99).integers(3, 500, 40).tolist()
    server.generate(prompt, 1)
    server.post("/pause_generation", {"mode": "in_place"})
    before = server.status()["steps"]["prefill"]
    started = [server.start(prompt, 3) for _ in range(8)]
    wait_until(lambda: server.status()["queued"] == 8)
    server.post("/continue_generation", {})
    assert [future.result()["meta_info"]["cached_tokens"] for future in started] == [39] * 8
    assert server.status()["steps"]["prefill"] == before + 1


@pytest.mark.parametrize("action", ["/pause_generation", "/flush_cache"])
def test_running_and_queued_requests_survive(server: RolloutProcess, action: str) -> None:
    """Twice as many requests as run at once; the stock handlers lose one or end the server."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 500, 12).tolist() for _ in range(32)]
    server.post("/pause_generation", {"mode": "in_place"})
    started = [server.start(p, 40) for p in prompts]
    wait_until(lambda: server.status()["queued"] == 32)
    before = server.status()["output_tokens"]
    server.post("/continue_generation", {})
    wait_until(lambda: server.status()["output_tokens"] > before)
    server.post(action, {"mode": "retract"})
    if action == "/pause_generation":
        frozen = server.status()["output_tokens"]
        time.sleep(0.2)
        later = server.status()["output_tokens"]
        server.post("/continue_generation", {})
        assert later == frozen
    assert max(server.error(p, f.result()) for p, f in zip(prompts, started, strict=True)) <= 1e-4


def test_a_pause_can_end_everything(server: RolloutProcess, prompts: list[list[int]]) -> None:
    server.post("/pause_generation", {"mode": "retract"})
    started = [server.start(p, 200) for p in prompts * 2]
    wait_until(lambda: server.status()["queued"] == len(started))
    server.post("/continue_generation", {})
    try:
        server.post("/pause_generation", {"mode": "in_place"})  # now none of them can come to its end
        left = server.status()["running"] + server.status()["queued"]
        server.post("/pause_generation", {"mode": "abort"})
        reasons = Counter(f.result(30)["meta_info"]["finish_reason"]["type"] for f in started)
        assert reasons["abort"] == left > 0
    finally:
        server.post("/continue_generation", {})
    assert server.error(prompts[0], server.generate(prompts[0], 4)) <= 1e-4


@pytest.mark.parametrize(
    ("ids", "n", "named", "status"),
    [
        ([5, 512, 6], 4, "input_ids[1] is 512", 422),
        ([5, -1], 4, "input_ids[1] is -1", 422),
        ([], 4, "empty", 422),
        ([5] * 250, 6, "250 in the messages", 400),
    ],
)
def test_impossible_requests_name_what_is_wrong(
    server: RolloutProcess, ids: list[int], n: int, named: str, status: int
) -> None:
    assert named in server.generate(ids, n, status=status)["detail"]


def test_the_last_position_of_the_context_can_be_used(server: RolloutProcess) -> None:
    prompt = [7] * 250
    assert server.error(prompt, server.generate(prompt, 5)) <= 1e-4


def test_the_same_id_twice_is_a_conflict(server: RolloutProcess, prompts: list[list[int]]) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    first = server.start(prompts[0], 8, rid="twice")
    wait_until(lambda: server.status()["queued"] == 1)
    assert "twice" in server.generate(prompts[0], 4, rid="twice", status=409)["detail"]
    server.post("/continue_generation", {})
    assert len(first.result()["output_ids"]) == 8


def test_chat_and_completion_answer_in_openais_shape(server: RolloutProcess) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2, "seed": 1}
    chat = server.http.post("/v1/chat/completions", json=asked)
    choices = chat.raise_for_status().json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    assert choices[0]["message"]["role"] == "assistant"
    text = server.http.post(
        "/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "logprobs": 1}
    )
    choice = text.raise_for_status().json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert server.get("/v1/models")["data"][0]["max_model_len"] == 256
