"""The client of a teacher, against answers as SGLang, OpenAI and vLLM give them, and against Volley's own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared.clients.keys import read_key
from shared.clients.teacher import TeacherAway, TeacherClient, TeacherFailed, TeacherRefused, TeacherUnusable
from shared.errors import ConfigError, RateLimited, Unavailable, VolleyError
from shared.server_schema import TeacherServer
from tests.support.engine import RolloutDouble
from tests.support.tokenizer import tiny_tokenizer

IDS, START = np.array([40, 50, 60, 70, 80], np.int32), 2
TOLD = [-0.5, -1.25, -3.0]
TEXT = tiny_tokenizer().token
URL = "http://teacher"


class Answering(httpx.AsyncBaseTransport):
    """Always the same answer; keeps what it was asked."""

    def __init__(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.body, self.status, self.headers, self.asked = body, status, headers or {}, list[httpx.Request]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        content = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return httpx.Response(
            self.status, content=content, headers={"Content-Type": "application/json", **self.headers}
        )


async def asked(transport: httpx.AsyncBaseTransport, key: str | None = None, **server: Any) -> np.ndarray:
    made = TeacherServer(url=URL, **server)
    async with TeacherClient(made, TEXT, key=key, transport=transport) as teacher:
        return await teacher.logprobs(IDS, START)


def sglang(logprobs: list[Any] = TOLD, ids: list[Any] | None = None, texts: list[Any] | None = None) -> dict[str, Any]:
    ids = IDS[START:].tolist() if ids is None else ids
    texts = [None] * len(ids) if texts is None else texts
    rows = [[None, int(IDS[START - 1]), None], *map(list, zip(logprobs, ids, texts, strict=True))]
    return {"output_ids": [], "meta_info": {"prompt_tokens": 5, "input_token_logprobs": rows}}


def echo(logprobs: list[Any] = TOLD, texts: list[str] | None = None) -> dict[str, Any]:
    """Prompt and one generated token, as OpenAI's legacy endpoint echoes them."""
    texts = [TEXT(int(t)) for t in IDS] if texts is None else texts
    told = {"token_logprobs": [None, -9.0, *logprobs, -7.0], "tokens": [*texts, " more"]}
    return {"choices": [{"text": "x", "logprobs": told}]}


def of_prompt(logprobs: list[Any] = TOLD, ids: np.ndarray = IDS) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, with a more likely token beside each."""
    tables = [
        None if p is None else {str(t): {"logprob": p, "rank": 2}, "999": {"logprob": -0.1, "rank": 1}}
        for p, t in zip([None, -9.0, *logprobs], ids.tolist(), strict=True)
    ]
    return {"choices": [{"text": "x", "logprobs": None, "prompt_logprobs": tables}]}


@pytest.mark.parametrize(
    ("body", "model"), [(sglang(), None), (sglang(texts=[TEXT(int(t)) for t in IDS[START:]]), None), (echo(), "m"),
                        (echo(texts=[f"token_id:{t}" for t in IDS]), "m"), (of_prompt(), "m")],
)  # fmt: skip
async def test_every_shape_of_an_answer_is_read(body: Any, model: str | None) -> None:
    found = await asked(Answering(body), model=model)
    assert found.dtype == np.float32
    assert found.tolist() == TOLD


async def test_what_is_asked_is_what_servers_take() -> None:
    transport = Answering(sglang())
    await asked(transport, key="secret")
    (request,) = transport.asked
    assert (request.url, request.headers["Authorization"]) == (f"{URL}/generate", "Bearer secret")
    assert json.loads(request.content) == {
        "input_ids": IDS.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1},
        "return_logprob": True,
        "logprob_start_len": START - 1,
        "return_text_in_logprobs": True,
    }
    transport = Answering(of_prompt())
    await asked(transport, model="m", request={"echo": None, "logprobs": None, "prompt_logprobs": 0})
    assert transport.asked[0].url.path == "/completions"
    body = json.loads(transport.asked[0].content)
    assert body == {
        "model": "m", "prompt": IDS.tolist(), "max_tokens": 1, "temperature": 1, "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip


async def test_volleys_own_server_is_a_teacher() -> None:
    app = RolloutDouble().app()
    found = await asked(httpx.ASGITransport(app))
    assert found.tolist() == [-0.5, -0.75, -1.0]  # of positions 2, 3 and 4
    async with TeacherClient(TeacherServer(url=URL), TEXT, transport=httpx.ASGITransport(app)) as teacher:
        await teacher.ready()
        with pytest.raises(TeacherRefused, match=r"input_ids\[1\] is 600, outside the vocabulary of 512"):
            await teacher.logprobs(np.array([3, 600], np.int32), 1)


@pytest.mark.parametrize(
    ("body", "model", "kind", "named"),
    [
        (sglang([-0.5, -1.0], [60, 70], [None, None]), None, TeacherUnusable, "2 log-probabilities of 3 tokens"),
        (sglang([-0.5, None, -1.0]), None, TeacherUnusable, "not a number"),
        (sglang([-0.5, "x", -1.0]), None, TeacherUnusable, "not a number"),
        (sglang([-0.5, 0.5, -1.0]), None, TeacherUnusable, "positive"),
        (sglang([-0.5, -1e39, -1.0]), None, TeacherUnusable, "NaN or infinite"),
        (b'{"meta_info": {"input_token_logprobs": [[NaN]]}}', None, TeacherUnusable, "not valid JSON"),
        (sglang(ids=[60, 71, 80]), None, TeacherRefused, "another vocabulary"),
        (sglang(texts=["alpha", "beta", "gamma"]), None, TeacherRefused, "another vocabulary"),
        (echo(texts=["a", "b", "alpha", "beta", "gamma"]), "m", TeacherRefused, "another vocabulary"),
        (echo(texts=[f"token_id:{t + 1}" for t in IDS]), "m", TeacherRefused, "another vocabulary"),
        (of_prompt(ids=IDS + 1), "m", TeacherRefused, "another vocabulary"),
        ({"choices": [{"logprobs": None}]}, "m", TeacherUnusable, "holds no log-probabilities"),
        ({"choices": []}, "m", TeacherUnusable, "holds no log-probabilities"),
        ({"meta_info": {}}, None, TeacherUnusable, "holds no log-probabilities"),
        ([], None, TeacherUnusable, "holds no log-probabilities"),
        (b"", None, TeacherUnusable, "holds no log-probabilities"),
    ],
)
async def test_what_is_not_whole_is_no_data(body: Any, model: str | None, kind: type[VolleyError], named: str) -> None:
    with pytest.raises(kind, match=named):
        await asked(Answering(body), model=model)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, TeacherRefused), (401, TeacherRefused), (403, TeacherRefused), (404, TeacherRefused), (422, TeacherRefused),
     (429, RateLimited), (500, TeacherFailed), (502, TeacherAway), (503, TeacherAway), (504, TeacherAway)],
)  # fmt: skip
async def test_statuses_are_errors_with_a_name_and_never_hold_the_key(status: int, kind: type[VolleyError]) -> None:
    body = {"error": {"message": "the key sk-1234 is no good"}}
    with pytest.raises(kind, match="the key of token_file") as caught:
        await asked(Answering(body, status, {"Retry-After": "7"}), key="sk-1234")
    assert type(caught.value) is kind
    assert "sk-1234" not in str(caught.value)
    if isinstance(caught.value, Unavailable):
        assert caught.value.retry_after_s == (1.0 if status == 500 else 7.0)


async def test_nobody_there_passes_and_slow_ones_too() -> None:
    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ReadTimeout("slow") if request.url.path == "/generate" else httpx.ConnectError("nobody")

    with pytest.raises(TeacherFailed, match="did not answer in time") as slow:
        await asked(Silent())
    assert type(slow.value) is TeacherFailed
    with pytest.raises(TeacherAway):
        await asked(Silent(), model="m")


@pytest.mark.parametrize(("status", "is_there"), [(200, True), (404, True), (401, True), (502, False), (503, False)])
async def test_any_server_that_answers_is_there(status: int, is_there: bool) -> None:
    async with TeacherClient(TeacherServer(url=URL), TEXT, transport=Answering({}, status)) as teacher:
        if is_there:
            await teacher.ready()
        else:
            with pytest.raises(TeacherAway):
                await teacher.ready()


def test_a_key_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    with pytest.raises(ConfigError, match=r"services\.x: .*key is empty"):
        read_key(file, "services.x")
    file.write_text("k\n", encoding="utf-8")
    assert (read_key(file, "services.x"), read_key(None, "services.x")) == ("k", None)


async def test_a_key_that_a_server_says_back_is_told_to_nobody() -> None:
    problem = {
        "type": "about:blank",
        "title": "no",
        "detail": "wrong key sk-1",
        "hint": "your key Bearer sk-1 is wrong",
    }
    transport = Answering(problem, 401, {"Content-Type": "application/problem+json"})
    with pytest.raises(TeacherRefused) as refused:
        await asked(transport, key="sk-1")
    assert "sk-1" not in str(refused.value)


@pytest.mark.parametrize("texts", [None, ["<s>", *["Up"] * 4]])
async def test_an_echo_with_tokens_of_its_own_before_ours_is_refused(texts: list[str] | None) -> None:
    told = {"token_logprobs": [None, -9.0, -9.0, *TOLD, -7.0], "tokens": texts and [*texts, "Up", " more"]}
    with pytest.raises(TeacherUnusable, match="returned 7 log-probabilities of 3 tokens"):
        await asked(Answering({"choices": [{"text": "x", "logprobs": told}]}), model="m")


@pytest.mark.parametrize("wrong", [False, "0", "-1.5"])
async def test_what_only_looks_like_a_number_is_none(wrong: Any) -> None:
    with pytest.raises(TeacherUnusable, match="not a number"):
        await asked(Answering(sglang([-1.0, wrong, -1.0])))
