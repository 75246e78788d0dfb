"""Every service under generated requests: no server error, every error a problem body, answers as declared.

`VOLLEY_FUZZ_CASES` sets the number of cases a service, `VOLLEY_FUZZ_SEED` which ones; `make fuzz` runs 5,000.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.driver import Fuzzer, in_a_thread
from tests.fuzz.stack import OPENERS, RUN, TOKEN, open_stack, run_config
from tests.fuzz.values import CASES
from tests.support.net import HTTP
from tests.support.submitted import ADDER
from tools.embedded_redis import embedded_server

HEADERS = {"Authorization": f"Bearer {TOKEN}"}

SEED = int(os.environ.get("VOLLEY_FUZZ_SEED", "1"))
SUBMITTED = ("s1", "s2")
FIRST = "e000001-s000000"
CALL = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "40+2"}'}}
TAGGED = '<tool_call>{"name":"calculator","arguments":{"expression":"1/0"}}</tool_call>'
SAYS = ("<answer>Right || Down</answer>", "#### 42", TAGGED, "")

KNOWN: dict[str, dict[str, list[Any]]] = {
    "env": {
        "env": ["frozen_lake", "sokoban", "gsm8k", "v1", None],
        "base": ["frozen_lake", "sokoban", "gsm8k", "v1"],
        "name": ["v1", "v2", "v3", *["calculator"] * 6, *SUBMITTED * 4],
        "arguments": [{"expression": "40+2"}, {}],
        "source": [ADDER, ADDER, "class A: pass", "(" * 50],
        "entry": [None, None, "Adder", "a.b:C"],
        "weight": [0.0, 0.0, 1.0, -1.0],
        "config": [
            {},
            {},
            {"size": 5},
            {"max_turns": 1},
            {"dim_room": [5, 5]},
            {"tool": "none"},
            {"train": "/etc/passwd"},
            {"max_turns": -1},
        ],
        "split": ["train", "eval"],
        "index": [0, 0, 0, 1, 2, 3, 255, 10**6, -1],
        "request_id": [str(n) for n in range(40)],
        "message": [{"role": "assistant", "content": text} for text in SAYS]
        + [{"content": None, "tool_calls": [CALL]}],
        "episode_id": [],
    },
    "rollout": {
        "name": ["tiny"],
        "input_ids": [[5], [5, 6, 7], list(range(3, 90)), [10**6], []],
        "sampling_params": [
            {},
            {"max_new_tokens": 3},
            {"max_new_tokens": 0},
            {"temperature": 0, "top_k": 1},
            {"stop_token_ids": [5]},
            {"top_p": 2},
        ],
        "rid": ["a", "b", "c"],
        "return_logprob": [True, True, False],
        "logprob_start_len": [0, 1, -1, 500],
        "return_routed_experts": [True, False],
        "routed_experts_start_len": [0, 2, -1, 500],
        "manifest": [
            *[FIRST] * 6,
            f"{FIRST}/manifest.json",
            "../secrets",
            "/etc",
            "e000009-s000009",
            "",
            "\0",
            "a" * 5000,
            "x/" * 3000,
            {"blake3": "0" * 64, "size": 9},
            {"blake3": "0" * 64, "size": 2**40},
        ],
        "sources": [
            ["http://127.0.0.1:9"],
            ["http://127.0.0.1:9", "http://x/" + "y" * 100],
            [],
            ["file:///etc/passwd"],
        ],
        "digest": ["0" * 64, "..", "0" * 63 + "g"],
        "model_path": [*[FIRST] * 3, "..", "nothing", "\0", "a" * 300],
        "version": [FIRST, "e000001-s000001", "x"],
        "base_version": [FIRST, None],
        "mode": ["in_place", "retract", "abort"],
        "prompt": ["hello", [5, 6]],
        "max_tokens": [1, 3, 10**6],
        "n": [1, 2],
        "stream": [False],
    },
    "orchestrator": {"name": [RUN], "mixture": [{"frozen_lake": 1}, {"frozen_lake": 0}, {}], "request_id": ["1", "2"]},
    "trainer": {
        "digest": ["0" * 64, "..", "0" * 63 + "g"],
        "record": ["evals", "samples", "mixture", "ledger"],
        "lines": [['{"step": 0}'], ["{}", "{}"], ["[]"], ['{"a":\n1}'], []],
    },
}


@pytest.fixture
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        embedded_server(folder / "redis") as redis,
        in_a_thread(lambda: open_stack(run_config(folder, redis.url))) as urls,
    ):
        _submit(urls["env"])
        yield urls


def _newest(trainer: str) -> str:
    """The manifest's digest of what the trainer publishes."""
    return HTTP.get(f"{trainer}/weights/newest", headers=HEADERS).json()["manifest"]["blake3"]


def _submit(url: str) -> None:
    """Something to do with: one environment that can be put in use, and one that can be retired."""
    for name in SUBMITTED:
        body = {"name": name, "source": ADDER}
        assert HTTP.post(f"{url}/environments", json=body, headers=HEADERS).status_code == 202
    deadline = time.monotonic() + 120
    for name in SUBMITTED:
        shown = f"{url}/environments/{name}"
        while (row := HTTP.get(shown, headers=HEADERS).json()["versions"][0])["state"] != "active":
            assert time.monotonic() < deadline, row
            time.sleep(0.2)
    assert HTTP.post(f"{url}/environments/{SUBMITTED[0]}/retire", headers=HEADERS).status_code == 200


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OPENERS)
def test_no_request_is_a_server_error(urls: dict[str, str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known, gone = KNOWN[name], set[str]()
    if "digest" in known:
        digest = _newest(urls["trainer"])
        known = known | {"digest": [*known["digest"], digest]}
        answer = HTTP.get(f"{urls[name]}/weights/chunks/{digest}", headers=HEADERS)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
        # Once a server has loaded a checkpoint out of its folder, it has no chunks to pass on.
        gone = {"GET /weights/chunks/{digest}", "GET /weights/holdings/{digest}"} if name == "rollout" else gone
    if name == "env":
        gone = {f"{method} /episodes/{{episode_id}}/run" for method in ("GET", "POST")}  # need an agent's episode
    if name == "orchestrator":
        model = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
        gone = {f"POST /v1/{path}" for path in model}
        gone |= {"GET /v1/models", "GET /v1/sessions/{id}"}  # all of these need a session
        gone |= {"POST /v1/sessions/{id}/end", "POST /v1/sessions/{id}/reward"}
    fuzzer = Fuzzer(urls[name], known, TOKEN)
    findings = fuzzer.run(CASES, SEED, gone)
    with capsys.disabled():
        print(json.dumps({"service": name, "cases": findings.cases, "seed": SEED, "statuses": findings.statuses()}))
    assert not findings.failures, "\n\n".join(findings.failures.values())
    assert findings.cases >= CASES
    assert not findings.never_succeeded() - gone
