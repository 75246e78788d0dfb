"""Calls of tools in every dialect, with the clients of OpenAI and Anthropic over a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from tests.rollout.speaking import TOKENIZER, Server, running
from tests.support.engine import SETTINGS
from tests.support.templates import model_folder, published, tiny_folder
from volley_serving.dialects.grammars import AnswerGrammar
from volley_serving.dialects.prompts import render
from volley_serving.dialects.records import Asked
from volley_serving.templates.answers import AnswerRenderer

TINY_TEMPLATE = json.loads((Path(SETTINGS.engine.model_path) / "tokenizer_config.json").read_text("utf-8"))[
    "chat_template"
]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ANSWER = f"<think>I add.</think>\n\nSure.\n{CALL}"
ARGUMENTS = {"a": 1, "b": "é"}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT: Any = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES: Any = {"model": "m", "tools": [{"type": "function", "strict": None, **FUNCTION}]}
MESSAGES: Any = {
    "model": "m",
    "max_tokens": 500,
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}
QUESTION: Any = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    folder = tiny_folder(tmp_path / "model", chat_template=published()["qwen2_5"])
    async with running(tmp_path, ANSWER, model=folder) as server:
        yield server


def prompt(server: Server) -> str:
    """Text of the newest request's prompt."""
    return server.tokenizer.decode(server.engine.requests[-1].input_ids.tolist())


async def test_chat_has_reasoning_content_and_calls(server: Server) -> None:
    answer = (await server.client.chat.completions.create(**CHAT, messages=QUESTION)).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Sure.")
    assert answer.message.reasoning_content == "I add."
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", ARGUMENTS)
    stream = server.client.chat.completions.stream(**CHAT, messages=QUESTION)
    async with stream as events:
        final = (await events.get_final_completion()).choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Sure.")
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    await server.client.chat.completions.create(**CHAT, messages=[*QUESTION, answer.message, result])
    assert f"Sure.\n{CALL}<|im_end|>" in prompt(server)
    assert "<tool_response>\n2\n</tool_response>" in prompt(server)
    plain = await server.client.chat.completions.create(**CHAT, messages=QUESTION, tool_choice="none")
    assert (plain.choices[0].message.tool_calls, plain.choices[0].message.content) == (None, f"Sure.\n{CALL}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_required_call_is_begun_in_the_prompt(server: Server, choice: Any) -> None:
    server.say(' {"a": 1, "b": "é"}}\n</tool_call>')
    answer = await server.client.chat.completions.create(**CHAT, messages=QUESTION, tool_choice=choice)
    assert prompt(server).endswith('<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments":')
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
    other = {"type": "function", "function": {"name": "multiply"}}
    server.say('add", "arguments": {}}</tool_call>')
    tools = [*CHAT["tools"], other]
    answer = await server.client.chat.completions.create(
        model="m", messages=QUESTION, tools=tools, tool_choice="required"
    )
    assert prompt(server).endswith('<tool_call>\n{"name": "')
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    named: Any = {"type": "function", "function": {"name": "divide"}}
    with pytest.raises(openai.UnprocessableEntityError, match="divide"):
        await server.client.chat.completions.create(**CHAT, messages=QUESTION, tool_choice=named)


async def test_decoding_ends_after_the_only_call_that_may_be(server: Server) -> None:
    server.say(f"{CALL}{CALL}")
    answer = await server.client.chat.completions.create(**CHAT, messages=QUESTION, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert server.tokenizer.decode(answer.choices[0].token_ids) == CALL
    both = await server.client.chat.completions.create(**CHAT, messages=QUESTION)
    assert len(both.choices[0].message.tool_calls) == 2


async def test_responses_whole_and_as_events(server: Server) -> None:
    whole = await server.client.responses.create(**RESPONSES, input="1 + 1?", instructions="Be brief.")
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (whole.status, whole.output_text) == ("completed", "Sure.")
    call = whole.output[2]
    assert (call.name, json.loads(call.arguments)) == ("add", ARGUMENTS)
    assert "Be brief." in prompt(server)
    async with server.client.responses.stream(**RESPONSES, input="1 + 1?", instructions="Be brief.") as events:
        seen = [event async for event in events]
        final = await events.get_final_response()
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "Sure."
    written = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in final.output]
    assert [{**one, "content": None} for one in written] == [
        {**item.model_dump(exclude={"id", "call_id"}), "content": None} for item in whole.output
    ]
    assert (final.output_text, final.usage) == (whole.output_text, whole.usage)


async def test_responses_read_their_own_items(server: Server) -> None:
    first = await server.client.responses.create(**RESPONSES, input="1 + 1?")
    call = first.output[2]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    await server.client.responses.create(**RESPONSES, input=items)
    said = prompt(server)
    answer = (await server.client.chat.completions.create(**CHAT, messages=QUESTION)).choices[0].message
    result = {"role": "tool", "tool_call_id": "x", "content": "2"}
    await server.client.chat.completions.create(**CHAT, messages=[*QUESTION, answer, result])
    assert prompt(server) == said
    cut = await server.client.responses.create(**RESPONSES, input="1 + 1?", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0]"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
async def test_responses_refuse_by_name(server: Server, fields: Any, named: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await server.client.responses.create(**{"model": "m", "input": "hi", **fields})
    assert named in caught.value.message


async def test_messages_whole_and_as_events(server: Server) -> None:
    whole = await server.anthropic.messages.create(**MESSAGES, messages=QUESTION, system="Be brief.")
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.stop_reason, whole.content[1].text, whole.content[2].input) == ("tool_use", "Sure.", ARGUMENTS)
    assert "Be brief." in prompt(server)
    async with server.anthropic.messages.stream(**MESSAGES, messages=QUESTION, system="Be brief.") as events:
        texts = [text async for text in events.text_stream]
        final = await events.get_final_message()
    assert "".join(texts) == "Sure."
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    counted = await server.anthropic.messages.count_tokens(
        model="m", messages=QUESTION, system="Be brief.", tools=MESSAGES["tools"]
    )
    assert counted.input_tokens == whole.usage.input_tokens


async def test_messages_read_their_own_blocks(server: Server) -> None:
    first = await server.anthropic.messages.create(**MESSAGES, messages=QUESTION)
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "2"}]}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    await server.anthropic.messages.create(**MESSAGES, messages=history)
    assert f"Sure.\n{CALL}<|im_end|>" in prompt(server)
    assert "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in prompt(server)
    cut = await server.anthropic.messages.create(
        model="m", max_tokens=50, messages=[*QUESTION, {"role": "assistant", "content": "It"}], stop_sequences=["Su"]
    )
    assert prompt(server).endswith("<|im_start|>assistant\nIt")
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Su")
    named: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    await server.anthropic.messages.create(**MESSAGES, messages=QUESTION, tool_choice=named)
    assert prompt(server).endswith('{"name": "add", "arguments":')
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.UnprocessableEntityError, match="image"):
        await server.anthropic.messages.create(**MESSAGES, messages=[{"role": "user", "content": [image]}])


async def test_thinking_is_turned_off_where_the_template_can(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", chat_template=published()["qwen3"])
    async with running(tmp_path, "Two.", model=folder) as server:
        ends = dict[str, str]()
        for effort in ("none", "medium"):
            await server.client.chat.completions.create(model="m", messages=QUESTION, reasoning_effort=effort)
            ends[effort] = prompt(server)[-40:]
        await server.client.responses.create(model="m", input="1 + 1?", reasoning={"effort": "none"})
        assert prompt(server).endswith(ends["none"])
        for type_, end in (("disabled", ends["none"]), ("enabled", ends["medium"])):
            thinking: Any = {"type": type_, "budget_tokens": 1024}
            await server.anthropic.messages.create(model="m", max_tokens=50, messages=QUESTION, thinking=thinking)
            assert prompt(server).endswith(end)
    assert ends["none"].endswith("<think>\n\n</think>\n\n")
    assert not ends["medium"].endswith(ends["none"])


async def test_models_are_listed_and_found(server: Server) -> None:
    (model,) = [one async for one in server.client.models.list()]
    assert (await server.client.models.retrieve(model.id)).id == model.id
    assert (await server.anthropic.models.retrieve(model.id)).id == model.id
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        await server.client.models.retrieve("gpt-4")


FORMS = ("qwen2_5", "qwen3", "qwen3_6", "llama3", "llama3_2", "deepseek_r1_distill", "qwen3_8")


@pytest.mark.parametrize("name", sorted(set(FORMS) & published().keys()))
def test_the_form_of_a_call_is_the_templates(tmp_path: Path, name: str) -> None:
    tokenizer = ChatTokenizer(model_folder(tmp_path / name, published()[name]))
    tools = CHAT["tools"]
    try:
        form = AnswerRenderer(tokenizer).call_form(QUESTION, tools)
    except InputError:
        assert "tool_calls" not in published()[name]
        return
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    said: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = tokenizer.decode(tokenizer.render_prompt([*QUESTION, said], tools, header=False))
    begun = f"{form.start}add{form.between}"
    assert begun in whole
    if form.end is not None:
        assert json.loads(whole.partition(begun)[2].rpartition(form.end)[0] if form.end else "{}") == ARGUMENTS


def accepts(grammar: AnswerGrammar | None, text: str) -> bool:
    """True if the text matches a grammar as a whole."""
    assert grammar is not None
    assert grammar.kind == "lark"
    file = str(Path(SETTINGS.engine.model_path) / "tokenizer.json")
    tokenizer = LLTokenizer(file, n_vocab=TOKENIZER.vocab_size, eos_token=TOKENIZER.eos_id)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CLOSED: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def test_a_required_call_follows_the_schema_of_its_tool(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", chat_template=published()["qwen2_5"]))
    tools = [{"type": "function", "function": {"name": name, "parameters": CLOSED}} for name in ("add", 'sub"tract')]
    asked = Asked(messages=tuple(QUESTION), tools=tuple(tools), tool_choice="required")
    any_call = render(asked, tokenizer).grammar
    assert accepts(any_call, 'add", "arguments": {"a": 1}}\n</tool_call>')
    assert not accepts(any_call, 'add", "arguments": {"b": 1}}\n</tool_call>')
    assert not accepts(any_call, 'multiply", "arguments": {"a": 1}}\n</tool_call>')
    named = render(replace(asked, tool_name="add"), tokenizer).grammar
    assert accepts(named, ' {"a": 1}}\n</tool_call>')
    assert accepts(named, '{"a":1}}\n</tool_call>')
    assert not accepts(named, ' {"a": 1}}\n</tool_call> and more')


def test_a_format_beside_tools_allows_the_json_or_a_call(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", chat_template=published()["qwen2_5"]))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    tools = ({"type": "function", "function": {"name": "add", "parameters": CLOSED}},)
    grammar = render(Asked(messages=tuple(QUESTION), tools=tools, schema=schema), tokenizer).grammar
    assert accepts(grammar, '{"sum": 2}')
    assert accepts(grammar, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert not accepts(grammar, "two")
    with pytest.raises(InputError, match=r"tools\[0\]"):
        render(Asked(messages=tuple(QUESTION), tools=({"type": "function"},), schema=schema), tokenizer)
    thinking = TINY_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "thinking", chat_template=thinking))
    grammar = render(Asked(messages=tuple(QUESTION), schema=schema), tokenizer).grammar
    assert accepts(grammar, 'One and {"one"}.</think>\n\n{"sum": 2}')
    assert not accepts(grammar, '{"sum": 2}')


LONG = "play " * 40_000
LONG_PROMPTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": [LONG]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/generate": {"text": LONG},
}


@pytest.mark.parametrize("path", LONG_PROMPTS)
async def test_a_text_that_cannot_fit_the_context_is_refused_untokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tokenized, encode = list[int](), ChatTokenizer.encoded

    def watched(self: ChatTokenizer, text: str) -> Any:
        encoding = encode(self, text)
        tokenized.append(len(text))
        return encoding

    monkeypatch.setattr(ChatTokenizer, "encoded", watched)
    model = {} if path == "/generate" else {"model": "m"}
    answer = await server.http.post(path, json={**model, **LONG_PROMPTS[path]})
    assert (answer.status_code, "maximum context length" in answer.text) == (400, True)
    assert max(tokenized, default=0) < len(LONG)
