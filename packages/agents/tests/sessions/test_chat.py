"""The recorder as an agent sees it, through the real OpenAI SDK."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import openai
import pytest

from packages.agents.tests.sessions.recorder import MODEL, TOKENIZER, WIDE, recording, said
from shared.models.chat import ChatTokenizer
from tests.orchestrator.fakes import Say, ScriptedEngine
from tests.support.asgi import served
from tests.support.looking_back import LOOKING_BACK, TEMPLATES
from tests.support.templates import tiny_folder
from volley_agents.sessions import calls, serving
from volley_agents.sessions.trajectories import tokens_of

ASK = [{"role": "user", "content": "play"}]


async def test_a_conversation_becomes_one_exact_sequence(tmp_path):
    async with recording(tmp_path, said("one"), said("two")) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        first = await client.chat.completions.create(model=MODEL, messages=ASK)
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason, first.model) == ("one", "stop", MODEL)
        more = [*ASK, message.model_dump(), {"role": "user", "content": "next"}]
        second = await client.chat.completions.create(model=MODEL, messages=more)
        assert second.choices[0].message.content == "two"
        first_ids, second_ids = (np.array(recorder.engine.outputs[n]) for n in (0, 1))
        prompt = recorder.engine.prompts[1]
        assert prompt[: len(recorder.engine.prompts[0]) + len(first_ids)].tolist() == [
            *recorder.engine.prompts[0],
            *first_ids,
        ]
        tokens = tokens_of(session.tree, 1.0)
        assert tokens.trunk.token_ids.tolist() == [*prompt, *second_ids]
        assert not tokens.branches
        assert tokens.trunk.token_ids[tokens.trunk.loss_mask == 1].tolist() == [*first_ids, *second_ids]
        assert [turn.role for turn in tokens.trunk.turns] == ["prompt", "assistant", "user", "assistant"]
        assert TOKENIZER.decode(tokens.trunk.token_ids.tolist()).count("play") == 1


async def test_a_stream_and_n_samples(tmp_path):
    async with recording(tmp_path, said("ab"), said("cd"), said("ef")) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ab"
        assert chunks[-1].usage.completion_tokens == len(session.tree.nodes[0].ids)
        both = await client.chat.completions.create(model=MODEL, messages=ASK, n=2)
        assert [choice.message.content for choice in both.choices] == ["cd", "ef"]
        seeds = [params["sampling_seed"] for params in recorder.engine.params]
        assert len(set(seeds)) == 3
        tokens = tokens_of(session.tree, 0.0)
        n_prompt = len(recorder.engine.prompts[0])
        assert [(branch.parent, branch.shared) for branch in tokens.branches] == [(0, n_prompt), (0, n_prompt)]


async def test_errors_have_the_classes_of_the_sdk(tmp_path):
    bounds = replace(WIDE, context_length=64, max_response_length=16, max_turns=2)
    async with recording(tmp_path, said("a"), said("b"), bounds=bounds) as recorder, recorder.playing() as session:
        client = recorder.client(session)

        async def ask(**fields):
            return await client.chat.completions.create(**{"model": MODEL, "messages": ASK, **fields})

        with pytest.raises(openai.BadRequestError) as found:
            await ask(messages=[{"role": "user", "content": "long " * 200}])
        assert found.value.code == "context_length_exceeded"
        assert session.limit == "context"
        with pytest.raises(openai.UnprocessableEntityError, match="top_logprobs"):
            await ask(logprobs=True, top_logprobs=2)
        assert (await ask(model="gpt-4o")).model == MODEL
        await ask()
        with pytest.raises(openai.BadRequestError) as found:
            await ask()
        assert (found.value.code, session.limit) == ("calls_used_up", "turns")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="vs_x_y").chat.completions.create(model=MODEL, messages=ASK)
        await session.end()
        with pytest.raises(openai.APIStatusError) as found:
            await ask()
        assert found.value.status_code == 410


async def test_an_agent_that_leaves_ends_its_call(tmp_path):
    async with recording(tmp_path) as recorder, recorder.playing() as session:
        recorder.engine.delay_s = 60.0
        calling = asyncio.create_task(recorder.client(session).chat.completions.create(model=MODEL, messages=ASK))
        while not recorder.engine.running:
            await asyncio.sleep(0.01)
        calling.cancel()
        async with asyncio.timeout(20):
            while not recorder.engine.aborted:
                await asyncio.sleep(0.01)
        assert not session.tree.nodes


async def test_the_three_dialects_continue_one_another(tmp_path):
    """A conversation begun by chat completions goes on by responses and messages: the turns are one sequence."""
    texts = ["one", "two", "three", "four"]
    async with recording(tmp_path, *map(said, texts)) as recorder, recorder.playing() as session:
        client, http = recorder.client(session), recorder.http(recorder.sessions.key_of(session))
        chat = await client.chat.completions.create(model=MODEL, messages=ASK)
        items = [*ASK, {"role": "assistant", "content": chat.choices[0].message.content}, ASK[0]]
        second = await client.responses.create(model=MODEL, input=items)
        assert second.output_text == "two"
        items += [item.model_dump() for item in second.output]
        third = await client.responses.create(model=MODEL, input=[*items, ASK[0]])
        assert third.output_text == "three"
        said_so_far = [ASK[0]]
        for text in texts[:3]:
            said_so_far += [{"role": "assistant", "content": [{"type": "text", "text": text}]}, ASK[0]]
        body = {"model": MODEL, "max_tokens": 32, "messages": said_so_far}
        fourth = await http.post(
            "/messages", json={**body, "model": "claude"}, headers={"x-api-key": recorder.sessions.key_of(session)}
        )
        assert [block["text"] for block in fourth.json()["content"]] == ["four"]
        assert fourth.json()["model"] == MODEL
        assert fourth.headers["x-volley-sampling"] == "temperature=1.0; top_p=1.0; top_k=-1"
        assert len(session.tree.leaves()) == 1
        assert len(session.tree.nodes) == 4
        counted = await http.post("/messages/count_tokens", json={"messages": ASK})
        assert counted.json() == {"input_tokens": len(recorder.engine.prompts[0])}
        failed = await http.post("/messages", json={"model": MODEL, "messages": ASK})  # without max_tokens
        assert (failed.status_code, failed.json()["type"], failed.json()["error"]["type"]) == (
            422,
            "error",
            "invalid_request_error",
        )


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
TEMPLATE = """{%- if tools %}<|im_start|>tools
{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


WITHOUT_TOOLS = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
REST = ' {"at": "é"}}</tool_call>'


@pytest.mark.parametrize(
    ("template", "choice", "said"),
    [(TEMPLATE, "auto", CALL), (WITHOUT_TOOLS, "auto", CALL), (WITHOUT_TOOLS, "required", REST)],
    ids=["template", "described", "described and required"],
)
async def test_calls_of_tools_go_in_and_out(tmp_path, template, choice, said):
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", chat_template=template))
    script = [Say([*tokenizer.encode(text), tokenizer.eos_id]) for text in (said, "seen")]
    bounds = replace(WIDE, max_response_length=128)
    async with (
        recording(tmp_path, *script, bounds=bounds, tokenizer=tokenizer) as recorder,
        recorder.playing() as session,
    ):
        client = recorder.client(session)
        first = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice)
        call = first.choices[0].message.tool_calls[0]
        assert (call.function.name, first.choices[0].finish_reason) == ("look", "tool_calls")
        spaced = call.model_dump() | {"function": {"name": "look", "arguments": '{ "at" : "\\u00e9" }'}}
        message = {"role": "assistant", "content": None, "tool_calls": [spaced]}
        more = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "a lake"}]
        second = await client.chat.completions.create(model=MODEL, messages=more, tools=[TOOL])
        assert second.choices[0].message.content == "seen"
        tokens = tokens_of(session.tree, 0.0)
        assert [turn.role for turn in tokens.trunk.turns] == ["prompt", "assistant", "tool", "assistant"]
        assert not tokens.branches
        text = tokenizer.decode(tokens.trunk.token_ids.tolist())
        assert text.count(said) == 1
        assert "a lake" in text
        assert ("- look(at)" in text) == (template == WITHOUT_TOOLS)


@pytest.mark.parametrize("name", ["counts the messages", "reminds after the last user", "numbers users"])
async def test_a_conversation_has_the_prompts_of_the_template_also_where_it_changes_earlier_messages(tmp_path, name):
    """Each answer is trained once, after the prompt that the model saw."""
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", chat_template=TEMPLATES[name]))
    async with (
        recording(tmp_path, said("one"), said("two"), said("three"), tokenizer=tokenizer) as recorder,
        recorder.playing() as session,
    ):
        client, messages = recorder.client(session), list[dict]()
        for n in range(3):
            messages.append({"role": "user", "content": f"question {n}"})
            right = tokenizer.render_prompt(messages)
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            assert recorder.engine.prompts[n].tolist() == right
            messages.append(answer.choices[0].message.model_dump())
        tokens = tokens_of(session.tree, 0.0)
        n_branches = 2 if name in LOOKING_BACK else 0
        assert len(tokens.branches) == n_branches
        assert [node.reason for node in session.tree.nodes.values()][1:] == ["template" if n_branches else None] * 2
        learned = [one.token_ids[one.loss_mask == 1] for one in (tokens.trunk, *tokens.branches)]
        assert sorted(np.concatenate(learned)) == sorted(np.concatenate(recorder.engine.outputs))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_connection_ends_its_call_and_the_next_one_is_answered(tmp_path, monkeypatch, stream):
    """Over real HTTP: the client closes its socket while the model samples."""
    monkeypatch.setattr(serving, "_QUIET_S", 0.1)
    async with recording(tmp_path) as recorder, recorder.playing() as session, served(recorder.app) as url:
        recorder.engine.delay_s = 60.0
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"model": MODEL, "messages": ASK, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {recorder.sessions.key_of(session)}\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while not recorder.engine.running:
            await asyncio.sleep(0.01)
        if stream:
            async with asyncio.timeout(20):
                assert b": waiting" in await reader.readuntil(b": waiting")
        writer.close()
        async with asyncio.timeout(20):
            while not recorder.engine.aborted:
                await asyncio.sleep(0.01)
        assert (session.n_calls, len(session.tree.nodes)) == (0, 0)
        recorder.engine.delay_s = 0.0
        again = await recorder.client(session, max_retries=0).chat.completions.create(model=MODEL, messages=ASK)
        assert again.choices[0].message.content is not None
        assert session.n_calls == 1


async def test_a_stream_that_waits_ends_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "_QUIET_S", 0.05)
    async with recording(tmp_path) as recorder, recorder.playing() as session, served(recorder.app) as url:
        recorder.engine.delay_s = 60.0
        key = recorder.sessions.key_of(session)
        async with openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0) as client:
            streaming = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            await session.end()
            with pytest.raises(openai.APIError):
                async for _ in streaming:
                    pass


async def test_calls_in_progress_count_as_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "MAX_BRANCHES", 5)
    engine = ScriptedEngine(delay_s=0.05)
    async with recording(tmp_path, engine=engine) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        asking = [client.chat.completions.create(model=MODEL, messages=ASK, n=2) for _ in range(4)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(answer, openai.BadRequestError) for answer in answers) == 2
        assert len(session.tree.nodes) == 4
        assert not session.planned


async def test_a_limit_counts_until_the_agent_goes_on(tmp_path):
    bounds = replace(WIDE, context_length=64, max_response_length=16)
    async with recording(tmp_path, said("a"), bounds=bounds) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "long " * 200}])
        assert session.limit == "context"
        await client.chat.completions.create(model=MODEL, messages=ASK)
        assert session.limit is None


async def test_a_call_that_was_given_up_samples_the_same_again(tmp_path):
    engine = ScriptedEngine(delay_s=60.0)
    async with recording(tmp_path, engine=engine) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=ASK))
        while not engine.running:
            await asyncio.sleep(0.01)
        asking.cancel()
        while session.planned:
            await asyncio.sleep(0.01)
        engine.delay_s = 0.0
        await client.chat.completions.create(model=MODEL, messages=ASK)
        await client.chat.completions.create(model=MODEL, messages=ASK)
        seeds = [params["sampling_seed"] for params in engine.params]
        assert seeds[0] == seeds[1] != seeds[2]
