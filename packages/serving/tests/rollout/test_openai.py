"""OpenAI's endpoints over a fake engine: every field that a client may send is honoured, ignored or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import numpy as np
import openai
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from sgl_jax.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.engines.base import OPTIONS, GenerateRequest, Grammar, OnTokens, SamplingParams
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine, counted
from tests.support.tokenizer import tiny_tokenizer
from volley_serving.dialects.chat import ChatBody
from volley_serving.dialects.completions import CompletionBody
from volley_serving.dialects.fields import IGNORED, NEUTRAL
from volley_serving.dialects.messages import CountBody, MessagesBody
from volley_serving.dialects.responses import ResponsesBody

VERSION = "e000001-s000000"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    TEXT: {"prompt": [34], "max_tokens": 4},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    f"{MESSAGES}/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
MODEL = ModelConfig.parse(models.tiny_config())


class Recorded(FakeEngine):
    """Keeps the requests, and stops at the tokens they name."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        super().__init__(version=VERSION, draw=self.answer)

    def answer(self, request: GenerateRequest) -> np.ndarray:
        self.requests.append(request)
        ids = counted(request)
        ends = np.flatnonzero(np.isin(ids, request.sampling.stop_token_ids))
        return ids[: ends[0] + 1] if ends.size else ids

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Any:
        result = await super().generate(request, on_tokens)
        last = int(result.output_ids[-1])
        if last in request.sampling.stop_token_ids:
            result = replace(result, finish=replace(result.finish, type="stop", matched=last, length=None))
        return result

    @property
    def sampling(self) -> SamplingParams:
        return self.requests[-1].sampling


@pytest.fixture
def engine() -> Recorded:
    return Recorded()


def client_of(engine: FakeEngine, folder: Path, model: str = "") -> httpx.AsyncClient:
    updates = WeightUpdater(engine, folder, MODEL, "test", state=Serving(VERSION))
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, model_path=model)) if model else SETTINGS
    app = build_app(settings, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


@pytest.fixture
async def http(engine: Recorded, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(engine, tmp_path) as client:
        yield client


async def told(http: httpx.AsyncClient, path: str, **fields: Any) -> tuple[int, str]:
    answer = await http.post(path, json={**ASKED[path], **fields})
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


# fields
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 3),
        ("regex", "[0-9]+"),
        ("guided_json", {"type": "object"}),
        ("guided_choice", ["a", "b"]),
        ("structured_outputs", {"choice": ["a"]}),
        ("logit_bias", {"5": 100}),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("enable_thinking", False),
        ("chat_template", "{{ messages }}"),
        ("reasoning_effort", "low"),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("prompt_logprobs", 1),
        ("suffix", "x"),
        ("max_token", 5),
        ("best_of", 2),
    ],
)
async def test_a_field_that_is_not_honoured_is_refused_by_name(
    http: httpx.AsyncClient, path: str, name: str, value: object
) -> None:
    status, message = await told(http, path, **{name: value})
    assert (status, message.partition("=")[0]) == (422, name)
    assert "is not supported (leave" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
async def test_a_field_of_chats_is_refused_beside_a_text(http: httpx.AsyncClient, name: str, value: object) -> None:
    status, message = await told(http, TEXT, **{name: value})
    assert (status, message.partition("=")[0]) == (422, name)


async def test_tools_are_described_where_the_template_does_not_write_them(
    engine: Recorded, http: httpx.AsyncClient
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([tool], []):
        assert (await told(http, CHAT, tools=tools))[0] == 200
        text = tiny_tokenizer().decode(engine.requests[-1].input_ids.tolist())
        assert ("You can use tools:\n- add()" in text) == bool(tools)


async def test_a_format_becomes_a_grammar_if_the_engine_has_them(engine: Recorded, http: httpx.AsyncClient) -> None:
    engine.info = replace(engine.info, options=OPTIONS)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert (await told(http, CHAT, response_format=wanted))[0] == 200
    assert engine.sampling.grammar is not None
    assert (engine.sampling.grammar.kind, json.loads(engine.sampling.grammar.text)) == ("json_schema", schema)
    assert (await told(http, CHAT, response_format={"type": "json_object"}))[0] == 200
    assert engine.sampling.grammar == Grammar("json_schema", '{"type":"object"}')
    assert (await told(http, CHAT, response_format={"type": "text"}))[0] == 200
    assert engine.sampling.grammar is None


async def test_all_refused_fields_are_named_at_once(http: httpx.AsyncClient) -> None:
    status, message = await told(http, CHAT, min_tokens=3, regex="x", user="me")
    assert (status, message.startswith("min_tokens=3, regex='x' are not supported")) == (422, True)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_optional_field_may_be_null(http: httpx.AsyncClient, path: str) -> None:
    model = ChatBody if path == CHAT else CompletionBody
    for name in {*model.model_fields, *NEUTRAL, *IGNORED, "guided_json", "reasoning_effort", "unheard_of"}:
        if name not in ("messages", "prompt"):
            assert await told(http, path, **{name: None}) == (200, ""), name
    required = "messages" if path == CHAT else "prompt"
    assert await told(http, path, **{required: None}) == (422, f"{required} is missing")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_asks_for_nothing_is_accepted(http: httpx.AsyncClient, path: str) -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            assert await told(http, path, **{name: value}) == (200, ""), name
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "stream": False, "parallel_tool_calls": False}
    assert await told(http, path, **harmless, service_tier="flex", n=1, presence_penalty=0.0) == (200, "")


async def test_the_routers_requests_are_accepted(http: httpx.AsyncClient) -> None:
    """SGLang's router always sends its own fields with their defaults."""
    shared = {"stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
    chat = {"logprobs": False, "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    assert await told(http, CHAT, model="m", return_hidden_states=False, **shared, **chat) == (200, "")
    assert await told(http, TEXT, model="m", return_hidden_states=False, echo=False, **shared) == (200, "")
    native = {"return_text_in_logprobs": False, "stream": False, "log_metrics": True, "return_hidden_states": False}
    more = {"background": False, "no_logs": False, "return_bytes": False, "return_entropy": False}
    assert (await http.post("/generate", json={"input_ids": [5], **native, **more})).status_code == 200


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatCompletionRequest), (TEXT, CompletionRequest)])
async def test_sglangs_own_defaults_are_accepted(http: httpx.AsyncClient, path: str, model: Any) -> None:
    body = model(model="m", **ASKED[path]).model_dump(by_alias=True)
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "params", "model"),
    [
        (CHAT, chat_params.CompletionCreateParamsNonStreaming, ChatBody),
        (TEXT, completion_params.CompletionCreateParamsNonStreaming, CompletionBody),
        (RESPONSES, response_params.ResponseCreateParamsNonStreaming, ResponsesBody),
        (MESSAGES, message_params.MessageCreateParamsNonStreaming, MessagesBody),
        (f"{MESSAGES}/count_tokens", MessageCountTokensParams, CountBody),
    ],
)
async def test_every_field_of_the_apis_own_client_is_judged(
    http: httpx.AsyncClient, path: str, params: type, model: Any
) -> None:
    """None of them is ignored because nobody knew it."""
    for name in get_type_hints(params):
        if name not in (*model.model_fields, *IGNORED):
            status, message = await told(http, path, **{name: {"is": "anything"}})
            assert (status, message.partition("=")[0]) == (422, name)


async def test_stop_token_ids_end_the_answer_and_are_not_in_its_text(http: httpx.AsyncClient, engine: Recorded) -> None:
    answer = (await http.post(TEXT, json={"prompt": [34], "max_tokens": 6, "stop_token_ids": [37]})).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("AB", "stop", [35, 36, 37])
    assert engine.sampling.stop_token_ids == (2, 37)
    status, message = await told(http, TEXT, stop_token_ids=[512])
    assert (status, "stop_token_ids" in message) == (422, True)
    assert (await told(http, CHAT, stop_token_ids=[1, "2"]))[0] == 422


async def test_every_declared_end_ends_a_turn_and_is_not_in_its_text(engine: Recorded, tmp_path: Path) -> None:
    folder = shutil.copytree(SETTINGS.engine.model_path, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 37]}', encoding="utf-8")
    async with client_of(engine, tmp_path, str(folder)) as http:
        choice = (await http.post(TEXT, json={"prompt": [34], "max_tokens": 6})).json()["choices"][0]
    assert engine.sampling.stop_token_ids == (2, 37)
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("AB", "stop", [35, 36, 37])


async def test_ignore_eos_goes_on_after_the_end_of_a_turn(http: httpx.AsyncClient, engine: Recorded) -> None:
    assert await told(http, CHAT, ignore_eos=True, stop_token_ids=[9]) == (200, "")
    assert (engine.sampling.ignore_eos, engine.sampling.stop_token_ids) == (True, (9,))
    assert await told(http, CHAT, ignore_eos=False) == (200, "")
    assert (engine.sampling.ignore_eos, engine.sampling.stop_token_ids) == (False, (2,))


async def test_special_tokens_are_left_out_of_the_text_on_request(http: httpx.AsyncClient) -> None:
    texts = []
    for skip in (False, True, None):
        body = {"prompt": [0], "max_tokens": 3, "ignore_eos": True, "skip_special_tokens": skip}
        texts.append((await http.post(TEXT, json=body)).json()["choices"][0]["text"])
    assert texts[0] == texts[2]
    assert "<|im_start|>" in texts[0]
    assert "<|im_start|>" not in texts[1]


@pytest.mark.parametrize(("given", "used"), [(1e-38, 0), (1e-320, 0), (5e-5, 0), (1e-4, 1e-4), (1e3, 1e3), (0, 0)])
async def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(
    http: httpx.AsyncClient, engine: Recorded, given: float, used: float
) -> None:
    for path in (CHAT, TEXT):
        assert await told(http, path, temperature=given) == (200, "")
        assert engine.sampling.temperature == used
    sampling = {"temperature": given, "max_new_tokens": 2}
    assert (await http.post("/generate", json={"input_ids": [5], "sampling_params": sampling})).status_code == 200
    assert engine.sampling.temperature == used


# messages
async def prompt_of(http: httpx.AsyncClient, messages: list[Any], **fields: Any) -> list[int]:
    body = json.dumps({"messages": messages, "max_tokens": 2, **fields})
    answer = await http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"]


async def test_parts_of_text_are_the_text(http: httpx.AsyncClient) -> None:
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello you"}]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}],
            "name": None,
        },
    ]
    assert await prompt_of(http, parts) == await prompt_of(http, plain)
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    answer = await http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]})
    assert (answer.status_code, "messages[0]" in answer.json()["detail"]) == (422, True)


USER, CUT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}


async def test_the_last_message_is_continued(http: httpx.AsyncClient) -> None:
    """By the field of vLLM and SGLang, or DeepSeek's or Moonshot's mark on the message."""
    whole = ChatTokenizer(Path(SETTINGS.engine.model_path)).render_prompt([USER, CUT], header=False)
    cut = await prompt_of(http, [USER, CUT], continue_final_message=True)
    assert cut == whole[: len(cut)]
    assert len(whole) == len(cut) + 2  # <|im_end|> and a line break
    assert await prompt_of(http, [USER, CUT], continue_final_message=True, add_generation_prompt=False) == cut
    for mark in ("prefix", "partial"):
        assert await prompt_of(http, [USER, {**CUT, mark: True}]) == cut
        assert await prompt_of(http, [USER, {**CUT, mark: False}], add_generation_prompt=False) == whole


CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("messages", "fields", "named"),
    [
        ([USER, CUT], {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt=true"),
        ([USER, {**CUT, "prefix": True}], {"add_generation_prompt": True}, "add_generation_prompt=true"),
        ([USER, {**CUT, "content": None}], {"continue_final_message": True}, "messages[1] has no content"),
        ([USER, {**CUT, "tool_calls": CALLS}], {"continue_final_message": True}, "tool_calls"),
        ([USER, {**CUT, "prefix": True}, USER], {}, "messages[1]: prefix=True"),
        ([USER, {**CUT, "partial": "yes"}], {}, "messages[1]: partial='yes'"),
        ([{**USER, "prefix": True}], {}, "messages[0]: prefix=True"),
        ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ([USER], {"chat_template_kwargs": {"messages": []}}, "messages"),
        ([USER, {**CUT, "audio": {"id": "audio_1"}}], {}, "messages[1] has audio"),
        ([USER, {**CUT, "refusal": "No."}], {}, "messages[1] has both"),
        ([USER, {**CUT, "content": None, "refusal": 3}], {}, "messages[1]: its refusal"),
    ],
)
async def test_what_cannot_be_continued_or_written_is_refused_by_name(
    http: httpx.AsyncClient, messages: list[Any], fields: dict[str, Any], named: str
) -> None:
    status, message = await told(http, CHAT, messages=messages, **fields)
    assert (status, named in message) == (422, True), message


async def test_variables_of_the_template_are_given_to_it(engine: Recorded, tmp_path: Path) -> None:
    folder = shutil.copytree(SETTINGS.engine.model_path, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] += "{% if add_generation_prompt and not thinking %}<think></think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = ChatTokenizer(folder)
    async with client_of(engine, tmp_path, str(folder)) as http:
        plain = await prompt_of(http, [USER])
        thinking = await prompt_of(http, [USER], chat_template_kwargs={"thinking": True})
    assert tokenizer.decode(plain) == tokenizer.decode(thinking) + "<think></think>"


async def test_a_refusal_is_what_the_assistant_said(http: httpx.AsyncClient) -> None:
    said = await prompt_of(http, [USER, {"role": "assistant", "content": "No."}, USER])
    parts = [{"type": "refusal", "refusal": "No."}]
    nothing = {"audio": None, "function_call": None, "tool_calls": None, "annotations": []}
    for content, refusal in ((None, "No."), ("No.", None), (parts, None), ([], "No.")):
        message = {"role": "assistant", "content": content, "refusal": refusal, **nothing}
        assert await prompt_of(http, [USER, message, USER]) == said


CALL_TEMPLATE = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"""


async def test_arguments_in_the_history_are_encoded_once(engine: Recorded, tmp_path: Path) -> None:
    folder = shutil.copytree(SETTINGS.engine.model_path, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    written = json.dumps(settings | {"chat_template": CALL_TEMPLATE})
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")
    function: Mapping[str, Any] = {"name": "f", "arguments": r'{"a": "é", "b": ["\ud83d"]}'}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    async with client_of(engine, tmp_path, str(folder)) as http:
        text = ChatTokenizer(folder).decode(await prompt_of(http, messages))
        assert '<tool_call>{"name": "f", "arguments": {"a": "é", "b": ["\ufffd"]}}</tool_call>' in text
        older = [messages[0], {"role": "assistant", "function_call": function}, messages[2]]
        assert ChatTokenizer(folder).decode(await prompt_of(http, older)) == text
        wrong = [*messages[:1], {**messages[1], "tool_calls": [{"function": {**function, "arguments": "[1"}}]}]
        answer = await http.post(CHAT, json={"messages": wrong})
    assert (answer.status_code, "messages[1].tool_calls[0]" in answer.json()["detail"]) == (422, True)


async def test_half_a_surrogate_pair_is_replaced(http: httpx.AsyncClient) -> None:
    cut, whole = [[{"role": "user", "content": text}] for text in ("cut \ud83d", "cut \ufffd")]
    assert await prompt_of(http, cut) == await prompt_of(http, whole)
    answer = await http.post("/generate", content=rb'{"text": "\ud83d", "sampling_params": {"max_new_tokens": 2}}')
    assert answer.status_code == 200, answer.text


# the client itself
async def test_openais_client_reads_the_answers_and_the_refusals(engine: Recorded, tmp_path: Path) -> None:
    async with (
        client_of(engine, tmp_path) as http,
        openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            max_completion_tokens=4,
            n=2,
            logprobs=True,
            user="me",
            metadata={"a": "b"},
            extra_body={"stop_token_ids": [], "ignore_eos": False, "min_tokens": 0},
        )
        assert len(chat.choices) == 2
        assert chat.choices[0].logprobs is not None
        text = await client.completions.create(model="m", prompt="hi", max_tokens=4, seed=1)
        assert text.usage is not None
        assert text.usage.completion_tokens == 4
        with pytest.raises(openai.UnprocessableEntityError, match="min_tokens=2 is not supported"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], extra_body={"min_tokens": 2}
            )
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 2, "seed": 1}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        for i, choice in enumerate(whole.choices):
            deltas = [one for chunk in chunks for one in chunk.choices if one.index == i]
            assert "".join(one.delta.content or "" for one in deltas) == choice.message.content
            assert [one.finish_reason for one in deltas if one.finish_reason] == [choice.finish_reason]
        assert chunks[-1].usage == whole.usage
