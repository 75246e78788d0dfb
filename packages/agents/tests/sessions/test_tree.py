"""Matching of requests to recorded turns, and the sequences that come of them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.types import Trajectory, VersionSpan
from volley_agents.sessions.messages import next_digest
from volley_agents.sessions.trajectories import tokens_of
from volley_agents.sessions.tree import ROOT, Node, Tree

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SYSTEM, ASK, MORE = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "play"},
    {"role": "user", "content": "next"},
)


def answer(text="yes", **fields):
    return {"role": "assistant", "content": text, **fields}


class Grown:
    """A tree that grows by answers; every answer has ids of its own."""

    def __init__(self):
        self.tree, self.n = Tree(), 0

    def say(self, messages, message, tools=(), variables=None, n_context=3):
        place = self.tree.find(messages, tools, variables or {})
        n = self.n
        ids = np.arange(10 * n, 10 * n + 2, dtype=np.int32)
        context = np.full(n_context, 1000 + place.n_known, np.int32)
        node = Node(
            number=n,
            parent=ROOT if place.node is None else place.node.number,
            draw=0,
            role="user",
            context=context,
            ids=ids,
            logprobs=np.full(2, -0.5, np.float32),
            versions=(VersionSpan("e000001-s000000", 0, 2),),
            finish="stop",
            digest=next_digest(place.digest, message),
            bare=next_digest(place.digest, message, reasoning=False),
            first=place.first,
            reason=place.reason,
        )
        self.tree.add(Node.decode(node.encode()))
        self.n += 1
        return self.tree.nodes[n]


def test_a_longer_history_continues_its_last_turn():
    grown = Grown()
    one = grown.say([SYSTEM, ASK], answer())
    two = grown.say([SYSTEM, ASK, answer(), MORE], answer("no"))
    three = grown.say([SYSTEM, ASK, answer(), MORE, answer("no"), MORE], answer("ok"))
    assert [node.parent for node in (one, two, three)] == [ROOT, 0, 1]
    assert [node.reason for node in (one, two, three)] == ["first", None, None]
    assert len(tokens_of(grown.tree, 0.0).branches) == 0


@pytest.mark.parametrize(
    ("messages", "tools", "parent", "reason"),
    [
        ([{"role": "system", "content": "a sub-agent"}, ASK], (), ROOT, "other beginning"),
        ([SYSTEM, {"role": "user", "content": "summary: yes"}], (), ROOT, "edited"),
        ([SYSTEM, ASK, answer(), MORE], (TOOL,), ROOT, "other tools"),
        ([SYSTEM, ASK, answer("edited"), MORE], (), ROOT, "edited"),
        ([SYSTEM, ASK, answer(), MORE, answer("edited"), MORE], (), 0, "edited"),
        ([SYSTEM, ASK, answer(), {"role": "user", "content": "another"}], (), 0, None),
        ([SYSTEM, ASK, answer()], (), 0, None),
        ([SYSTEM, ASK], (), ROOT, "edited"),
    ],
)
def test_where_another_request_stands(messages, tools, parent, reason):
    grown = Grown()
    grown.say([SYSTEM, ASK], answer())
    grown.say([SYSTEM, ASK, answer(), MORE], answer("no"))
    found = grown.tree.find(messages, tools, {})
    assert (ROOT if found.node is None else found.node.number, found.reason) == (parent, reason)


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": "é"}'}}


@pytest.mark.parametrize(
    ("given", "returned", "same"),
    [
        (answer(" yes\n"), answer("yes"), True),
        (answer("yes"), answer("yes", refusal=None, annotations=[], audio=None), True),
        (answer("yes", reasoning_content="hm"), answer("yes"), True),
        (answer("yes", reasoning_content="hm"), answer("yes", reasoning_content="hm"), True),
        (answer("yes", reasoning_content="hm"), answer("yes", reasoning_content="other"), False),
        (answer("yes"), answer("no"), False),
        (answer("", tool_calls=[CALL]), answer(None, tool_calls=[CALL]), True),
        (
            answer("", tool_calls=[CALL]),
            answer(
                "", tool_calls=[{**CALL, "function": {"name": "look", "arguments": json.dumps({"a": "é", "b": 1})}}]
            ),
            True,
        ),
        (answer("", tool_calls=[CALL]), answer("", tool_calls=[{**CALL, "id": "c2"}]), False),
        (answer("", tool_calls=[CALL]), answer(""), False),
    ],
)
def test_what_counts_as_the_same_answer(given, returned, same):
    grown = Grown()
    grown.say([ASK], given)
    assert (grown.tree.find([ASK, returned, MORE], (), {}).node is not None) == same


def test_reasoning_that_only_some_answers_keep():
    grown = Grown()
    grown.say([ASK], answer("a", reasoning_content="r"))
    grown.say([ASK, answer("a"), MORE], answer("b", reasoning_content="s"))
    third = grown.tree.find([ASK, answer("a"), MORE, answer("b", reasoning_content="s"), MORE], (), {})
    assert third.node is grown.tree.nodes[1]


def test_hostile_arguments_are_data():
    grown = Grown()
    for arguments in ('{"a": ', '{"a": 99999999999999999999999}', "null", '"\\ud800"', '{"a":{"a":' * 40):
        said = answer("", tool_calls=[{**CALL, "function": {"name": "look", "arguments": arguments}}])
        grown.say([ASK], said)
        assert grown.tree.find([ASK, said, MORE], (), {}).node is grown.tree.nodes[grown.n - 1]


@st.composite
def conversations(draw):
    """Requests of an agent that continues, edits, compacts, and repeats at will."""
    grown, ended = Grown(), [[SYSTEM, ASK]]
    for n in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(ended))
        cut = draw(st.integers(1, len(base)))
        messages = base[:cut] if draw(st.booleans()) else base
        if messages[-1]["role"] == "assistant":
            messages = [*messages, {"role": "user", "content": draw(st.sampled_from(["x", "y"]))}]
        tools = draw(st.sampled_from([(), (TOOL,)]))
        said = answer(draw(st.sampled_from(["yes", f"answer {n}"])))
        grown.say(messages, said, tools, n_context=draw(st.integers(1, 3)))
        ended.append([*messages, said])
    return grown


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_every_sampled_token_is_stored_once(grown):
    tree, tokens = grown.tree, tokens_of(grown.tree, 1.0)
    trajectory = Trajectory(
        ticket=1,
        sample_index=0,
        attempt=0,
        env="e",
        task="t",
        prompt_len=tokens.prompt_len,
        token_ids=tokens.trunk.token_ids,
        loss_mask=tokens.trunk.loss_mask,
        logprobs=tokens.trunk.logprobs,
        versions=tokens.trunk.versions,
        turns=tokens.trunk.turns,
        reward=1.0,
        success=True,
        status="completed",
        branches=tokens.branches,
    )
    trajectory.validate()
    whole = [sequence.token_ids.tolist() for sequence in trajectory.sequences()]
    assert sorted(whole) == sorted(tree.ids(leaf).tolist() for leaf in tree.leaves())
    sampled = [t for one in (trajectory, *trajectory.branches) for t in one.token_ids[one.loss_mask == 1].tolist()]
    assert sorted(sampled) == sorted(t for node in tree.nodes.values() for t in node.ids.tolist())
