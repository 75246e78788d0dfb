"""Calls whose prompts are token ids: `/v1/completions` of a session."""

import numpy as np
import openai
import pytest

from packages.agents.tests.sessions.recorder import MODEL, TOKENIZER, recording, said
from volley_agents.sessions.trajectories import tokens_of


async def complete(client, prompt, **more):
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, logprobs=0, extra_body={"return_token_ids": True}, **more
    )
    return answer.choices


async def test_a_prompt_of_ids_continues_the_turn_it_begins_with(tmp_path):
    async with recording(tmp_path, said("one"), said("two"), said("else")) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        (first,) = await complete(client, [5, 6, 7])
        assert (first.model_extra["prompt_token_ids"], first.text) == ([5, 6, 7], "one")
        assert first.logprobs.token_logprobs == pytest.approx(list(session.tree.nodes[0].logprobs))
        sampled = first.model_extra["token_ids"]
        (second,) = await complete(client, [5, 6, 7, *sampled, 8, 9])
        await complete(client, [5, 6])
        tokens = tokens_of(session.tree, 1.0)
        whole = [5, 6, 7, *sampled, 8, 9, *second.model_extra["token_ids"]]
        assert tokens.trunk.token_ids.tolist() == whole
        assert tokens.trunk.loss_mask.tolist() == [0] * 3 + [1] * len(sampled) + [0] * 2 + [1] * len(
            whole[5 + len(sampled) :]
        )
        assert [len(branch.token_ids) for branch in tokens.branches] == [2 + len(recorder.engine.outputs[2])]
        assert [node.reason for node in session.tree.nodes.values()] == ["first", None, "other beginning"]


async def test_the_longer_of_two_samples_is_continued(tmp_path):
    async with recording(tmp_path, said("a"), said("a b"), said("c")) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        short, long = sorted(await complete(client, [5, 6], n=2), key=lambda one: len(one.model_extra["token_ids"]))
        await complete(client, [5, 6, *long.model_extra["token_ids"]])
        parents = [node.parent for node in session.tree.nodes.values()]
        numbers = {tuple(node.ids.tolist()): node.number for node in session.tree.nodes.values()}
        assert parents == [-1, -1, numbers[tuple(long.model_extra["token_ids"])]]
        assert tuple(short.model_extra["token_ids"]) in numbers


async def test_texts_are_tokenized_and_chat_goes_on_beside(tmp_path):
    async with recording(tmp_path, said("x"), said("y")) as recorder, recorder.playing() as session:
        client = recorder.client(session)
        await complete(client, "2 + 2 =", max_tokens=3)
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "play"}])
        assert np.array_equal(recorder.engine.prompts[0], TOKENIZER.encode("2 + 2 ="))
        assert recorder.engine.params[0]["max_new_tokens"] == 3
        assert len(session.tree.leaves()) == 2


@pytest.mark.parametrize(
    ("prompt", "more", "named"),
    [
        ([], {}, "prompt"),
        ([10**6], {}, "1000000"),
        ([[5], [6]], {}, "prompt"),
        ([5], {"echo": True}, "echo"),
        ([5], {"extra_body": {"min_p": 0.5}}, "min_p"),
    ],
)
async def test_what_cannot_be_recorded_is_refused_by_name(tmp_path, prompt, more, named):
    async with recording(tmp_path) as recorder, recorder.playing() as session:
        with pytest.raises(openai.UnprocessableEntityError, match=named):
            await recorder.client(session).completions.create(model=MODEL, prompt=prompt, **more)
        assert not session.tree.nodes
