"""The client of a teacher, against answers as SGLang, OpenAI and vLLM give them, and against Volley's own server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared import codec
from shared.clients.keys import read_key
from shared.clients.rollout import RolloutClient
from shared.errors import ConfigError, InputError, RateLimited, Unavailable, VolleyError
from shared.models.chat import ChatTokenizer
from shared.server_schema import TeacherServer
from tests.support.engine import RolloutDouble
from tests.support.tokenizer import FOLDER, tiny_tokenizer
from volley_algorithms.teachers.client import TeacherAway, TeacherClient, TeacherFailed, TeacherRefused, TeacherUnusable
from volley_algorithms.teachers.token_texts import is_same

IDS, START = np.array([40, 50, 60, 70, 80], np.int32), 2
TOLD = [-0.5, -1.25, -3.0]
TEXT = tiny_tokenizer().token
TEXTS = [TEXT(int(token)) for token in IDS]
URL, MSGPACK = "http://teacher", {"Content-Type": codec.MEDIA_TYPE}


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
        return (await teacher.logprobs(IDS, START)).logprobs


def sglang(logprobs: list[Any] = TOLD, ids: list[Any] | None = None, texts: list[Any] | None = None) -> dict[str, Any]:
    ids = IDS[START:].tolist() if ids is None else ids
    texts = TEXTS[START:][: len(ids)] if texts is None else texts
    rows = [[None, int(IDS[START - 1]), None], *map(list, zip(logprobs, ids, texts, strict=True))]
    return {"output_ids": [], "meta_info": {"prompt_tokens": 5, "input_token_logprobs": rows}}


def echo(logprobs: list[Any] = TOLD, texts: list[str] | None = None) -> dict[str, Any]:
    """Prompt and one generated token, as OpenAI's legacy endpoint echoes them."""
    texts = TEXTS if texts is None else texts
    told = {"token_logprobs": [None, -9.0, *logprobs, -7.0], "tokens": [*texts, " more"]}
    return {"choices": [{"text": "x", "logprobs": told}]}


def of_prompt(
    logprobs: list[Any] = TOLD, ids: np.ndarray = IDS, texts: list[str] | list[None] | None = None
) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, with a more likely token beside each."""
    other = {"999": {"logprob": -0.1, "rank": 1, "decoded_token": "x"}}
    tables = [
        None if p is None else {str(t): {"logprob": p, "rank": 2, "decoded_token": text}, **other}
        for p, t, text in zip([None, -9.0, *logprobs], ids.tolist(), texts or TEXTS, strict=True)
    ]
    return {"choices": [{"text": "x", "logprobs": None, "prompt_logprobs": tables}]}


@pytest.mark.parametrize(
    ("body", "model"),
    [(sglang(), None), (sglang(texts=[TEXTS[START], None, ""]), None), (echo(), "m"), (of_prompt(), "m")],
)
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
    }  # fmt: skip


async def test_volleys_own_server_is_a_teacher() -> None:
    app = RolloutDouble().app()
    found = await asked(httpx.ASGITransport(app))
    assert found.tolist() == [-0.5, -0.75, -1.0]  # of positions 2, 3 and 4
    async with TeacherClient(TeacherServer(url=URL), TEXT, transport=httpx.ASGITransport(app)) as teacher:
        await teacher.ready()
        with pytest.raises(TeacherRefused, match=r"input_ids\[1\] is 600, outside the vocabulary of 512"):
            await teacher.logprobs(np.array([3, 600], np.int32), 1)


async def test_the_runs_own_servers_score_and_say_with_which_weights() -> None:
    async with RolloutClient(URL, transport=httpx.ASGITransport(RolloutDouble().app())) as server:
        found = await server.score(IDS, START)
        assert (found.logprobs.tolist(), found.version) == ([-0.5, -0.75, -1.0], "e000001-s000000")
        with pytest.raises(InputError, match=r"outside the vocabulary of 512"):
            await server.score(np.array([3, 600], np.int32), 1)


@pytest.mark.parametrize(
    ("rows", "version"),
    [
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None]], "e000001-s000000"),
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None], [-0.5, 81, None]], "e000001-s000000"),
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None], [float("inf"), 80, None]], "e000001-s000000"),
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None], [0.5, 80, None]], "e000001-s000000"),
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None], [None, 80, None]], "e000001-s000000"),
        ([[None, 50, None], [-0.5, 60, None], [-0.5, 70, None], [-0.5, 80, None]], None),
    ],
)
async def test_scores_of_an_own_server_that_are_not_whole_are_no_data(rows: list[Any], version: str | None) -> None:
    body = {"meta_info": {"input_token_logprobs": rows, "weight_version": version}}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=codec.pack(body), headers=MSGPACK))
    async with RolloutClient(URL, transport=transport) as server:
        with pytest.raises(Unavailable, match="invalid log-probabilities"):
            await server.score(IDS, START)


@pytest.mark.parametrize(
    ("body", "model", "kind", "named"),
    [
        (sglang([-0.5, -1.0], [60, 70], [None, None]), None, TeacherUnusable, "2 log-probabilities for 3 tokens"),
        (sglang([-0.5, None, -1.0]), None, TeacherUnusable, "not a number"),
        (sglang([-0.5, "x", -1.0]), None, TeacherUnusable, "not a number"),
        (sglang([-0.5, 0.5, -1.0]), None, TeacherUnusable, "positive"),
        (sglang([-0.5, -1e39, -1.0]), None, TeacherUnusable, "NaN or infinite"),
        (b'{"meta_info": {"input_token_logprobs": [[NaN]]}}', None, TeacherUnusable, "not valid JSON"),
        (sglang(ids=[60, 71, 80]), None, TeacherRefused, "another vocabulary"),
        (sglang(texts=["alpha", "beta", "gamma"]), None, TeacherRefused, "another vocabulary"),
        (echo(texts=["a", "b", "alpha", "beta", "gamma"]), "m", TeacherRefused, "another vocabulary"),
        (sglang(texts=[TEXTS[2], TEXTS[4], TEXTS[3]]), None, TeacherRefused, "another vocabulary: token 70 is"),
        (of_prompt(ids=IDS + 1), "m", TeacherRefused, "another vocabulary"),
        (of_prompt(texts=[*TEXTS[:4], "Ġzebra"]), "m", TeacherRefused, "token 80 is 'Ġzebra' there and"),
        (sglang(texts=[None] * 3), None, TeacherRefused, "no texts of tokens"),
        (echo(texts=[f"token_id:{t}" for t in IDS]), "m", TeacherRefused, "no texts of tokens"),
        (of_prompt(texts=[None] * 5), "m", TeacherRefused, "no texts of tokens"),
        (sglang(texts=["", "�", ""]), None, TeacherUnusable, "do not show"),
        (echo(texts=TEXTS[:3]), "m", TeacherUnusable, "2 texts for 3 tokens"),
        ({"choices": [{"logprobs": None}]}, "m", TeacherUnusable, "has no log-probabilities"),
        ({"choices": []}, "m", TeacherUnusable, "has no log-probabilities"),
        ({"meta_info": {}}, None, TeacherUnusable, "has no log-probabilities"),
        ([], None, TeacherUnusable, "has no log-probabilities"),
        (b"", None, TeacherUnusable, "has no log-probabilities"),
    ],
)
async def test_what_is_not_whole_is_no_data(body: Any, model: str | None, kind: type[VolleyError], named: str) -> None:
    with pytest.raises(kind, match=named):
        await asked(Answering(body), model=model)


async def test_parts_of_characters_alone_are_no_proof_of_a_vocabulary() -> None:
    transport = Answering(sglang(texts=["�", "“", "âĢ"]))
    async with TeacherClient(TeacherServer(url=URL), lambda _: "�", transport=transport) as teacher:
        with pytest.raises(TeacherUnusable, match="do not show"):
            await teacher.logprobs(IDS, START)


async def test_parts_of_characters_are_taken_from_a_teacher_that_had_our_tokens() -> None:
    transport = Answering(sglang())
    async with TeacherClient(TeacherServer(url=URL), TEXT, transport=transport) as teacher:
        await teacher.logprobs(IDS, START)
        transport.body = sglang(texts=["", "�", ""])
        assert (await teacher.logprobs(IDS, START)).logprobs.tolist() == TOLD


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ("Ġthat", " that", True), ("▁that", "that", True), ("that", " that", True), ("ĊĊ", "\n\n", True),
        ("▁▁", " ", True), ("<0x0A>", "\n", True), ("Ã©", "é", True), ("bytes:\\xe2\\x80\\x9c", "“", True),
        ("<|im_end|>", "<|im_end|>", True), (").", ") .", True), ("�that", " that", True), ("你好", "你好", True),
        ("�", "�", None), ("“", "�", None), ("’s", "�s", True), ("âĢ", "�", None),
        ("Ġâ", " �", None), ("é", " �", None), ("", " that", None),
        ("�", " that", None), ("", "�", None), ("<0xE2>", "�", True), ("x", "", None),
        ("Ġthis", " that", False), ("\n", "\n\n", False), (" ", "\n", False), (" ", "that", False), ("a", "\n", False),
        ("再见", "你好", False), ("->", "=>", False), ("apple", "�", False), ("<0x41>", "�", False), ("t", "�s", False),
        ("<|endoftext|>", "<|im_end|>", False), ("That", "that", False), ("<think>", "<tool_call>", False),
    ],
)  # fmt: skip
def test_texts_of_a_token(theirs: str, ours: str, same: bool | None) -> None:
    assert is_same(theirs, ours) is same


@pytest.mark.parametrize("write", [lambda piece, text: piece, lambda piece, text: text], ids=["pieces", "decoded"])
@pytest.mark.parametrize("folder", ["tiny", "quickstart"])
def test_a_vocabulary_is_its_own_and_no_shifted_one(folder: str, write: Any) -> None:
    """As vLLM writes tokens, and as SGLang does: no token is taken for another one, and hardly any shows nothing."""
    tokenizer = ChatTokenizer(FOLDER.parent / folder)
    pieces = json.loads((FOLDER.parent / folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    of_ids = {i: (write(piece, tokenizer.token(i)), tokenizer.token(i)) for piece, i in pieces.items()}
    assert all(is_same(*pair) is not False for pair in of_ids.values())
    assert np.mean([is_same(*pair) is True for pair in of_ids.values()]) > 0.7
    ids = sorted(of_ids)
    shifted = [is_same(of_ids[a][0], of_ids[b][1]) for a, b in itertools.pairwise(ids)]
    assert np.mean([same is False for same in shifted]) > 0.6


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
    with pytest.raises(TeacherUnusable, match="returned 7 log-probabilities for 3 tokens"):
        await asked(Answering({"choices": [{"text": "x", "logprobs": told}]}), model="m")


@pytest.mark.parametrize("wrong", [False, "0", "-1.5"])
async def test_what_only_looks_like_a_number_is_none(wrong: Any) -> None:
    with pytest.raises(TeacherUnusable, match="not a number"):
        await asked(Answering(sglang([-1.0, wrong, -1.0])))
