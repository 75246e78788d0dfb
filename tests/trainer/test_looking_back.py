"""In every turn, rollouts, demonstrations and servers have the tokens of transformers, or name the template's fault.

One difference is allowed: a rollout keeps the blocks of reasoning before what was sampled.
"""

import asyncio
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import pytest
import transformers

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.status import RunStatus
from services.trainer.rl_backend import check_turns
from shared.clients.env import Opening, StepReply
from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer
from shared.models.continuation import HistoryChanged
from shared.schema import RunConfig
from tests.orchestrator.fakes import Say, ScriptedEngine, ScriptedEnv, balancer_of, spec
from tests.support.looking_back import LOOKING_BACK, TEMPLATES
from tests.support.templates import model_folder
from volley_serving.dialects.described import with_tools_written
from volley_serving.dialects.prompts import render
from volley_serving.dialects.records import Asked
from volley_supervised.conversations.rendering import render_demonstration

sys.path.insert(0, str(Path(__file__).parents[2] / "bridges" / "verl"))

from volley_verl.continuation import Continuation, NotWritten

transformers.logging.set_verbosity_error()
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}},)
SYSTEM = {"role": "system", "content": "Be brief."}


def user(n):
    return {"role": "user", "content": f"question {n}"}


def said(n):
    return {"role": "assistant", "content": f"answer {n}"}


def called(n):
    call = {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": {"a": n}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(n, **keys):
    return {"role": "tool", "content": f"result {n}", **keys}


SIX = [message for n in range(6) for message in (user(n), said(n))]
RESULTS = [user(0), said(0), result(0), said(1), user(1), said(2), result(1), said(3), user(2), said(4)]
ANSWERED = [result(n, tool_call_id=f"call0000{n}", name="add") for n in range(2)]
CALLS = [user(0), called(0), ANSWERED[0], said(0), user(1), called(1), ANSWERED[1], said(1), user(2), said(2)]
LONG = [user(0), {"role": "assistant", "content": "word " * 100 + "end"}, user(1), said(1)]
OF_ENVIRONMENTS = [(SIX, ()), ([SYSTEM, *SIX[:6]], TOOLS), (RESULTS, TOOLS), ([SYSTEM, *RESULTS], TOOLS), (LONG, ())]
OF_AGENTS = [(CALLS, TOOLS), ([SYSTEM, *CALLS], TOOLS)]
ALSO_LOOKING_BACK = {"gptoss", "mistral 7B v0.3"}
WITH_CALLS = {"deepseekv3", "deepseek_r1_distill"}
"""Look back at the second of two rounds of calls."""
UNSAID = {"numbers answers", "adds words to answers"}
"""Write words into answers that the model does not say."""
UNMATCHED = {"gptoss"}
"""Refuses its own answers, with the tags in them, as content."""


@dataclass
class Talk(ScriptedEnv):
    """Plays the environment's side of a conversation."""

    messages: list = field(default_factory=list)
    tools: tuple = ()

    async def create(self, request_id, env, split, index, *, seed, snapshot=None):
        self.answers = answers_of(self.messages)
        return Opening("e1", "train/0", self.messages[: self.answers[0]], self.tools)

    async def step(self, episode_id, request_id, content):
        at, *self.answers = self.answers
        after = self.messages[at + 1 : self.answers[0]] if self.answers else []
        return StepReply(after, 1.0, not self.answers, False, not self.answers)


def answers_of(messages):
    return [i for i, one in enumerate(messages) if one["role"] == "assistant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with the special tokens of all templates."""
    return model_folder(tmp_path_factory.mktemp("models") / "all", "".join(TEMPLATES.values()))


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@dataclass
class Case:
    """A template in transformers and in Volley."""

    name: str
    reference: transformers.PreTrainedTokenizerFast
    tokenizer: ChatTokenizer

    def right(self, messages, tools, *, prompt=True):
        """Transformers' tokens; None if the template refuses the conversation."""
        given = as_json(messages) if "deepseek" in self.name else messages
        options = {"add_generation_prompt": prompt, "return_dict": False, "chat_template": TEMPLATES[self.name]}
        try:
            return self.reference.apply_chat_template(given, tools=list(tools) or None, **options)
        except jinja2.TemplateError:
            return None

    def sampled(self, messages, at, tools):
        """Token ids of message `at`, as a model would sample them: the template's, up to the end of the turn."""
        prompt = self.right(messages[:at], tools) or []
        whole, longer = (self.right(messages[: at + n], tools, prompt=False) or [] for n in (1, 2))
        n = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        unsaid = self.name in UNSAID and messages[at]["content"]
        if not whole or unsaid or (prompt[n:] and "<think>" not in self.tokenizer.decode(prompt[-12:])):
            return [*self.tokenizer.encode(messages[at]["content"]), self.tokenizer.eos_id]
        ids = [*whole[n:], *longer[len(whole) :][:1]] if longer[: len(whole)] == whole else whole[n:]
        end = next((i + 1 for i, token in enumerate(ids) if token in self.tokenizer.end_ids), None)
        return ids[:end] if end else [*whole[n:], self.tokenizer.eos_id]

    def same(self, found, right):
        texts = [self.tokenizer.decode(ids) for ids in (found, right)]
        thinks = any(block in text for text in texts for block in ("think>", "<|channel|>"))
        return list(found) == list(right) or (thinks and plain(texts[0]) == plain(texts[1]))


@pytest.fixture(scope="module")
def cases():
    return {}


@pytest.fixture
def case(folder, reference, cases, request):
    if (name := request.param) not in cases:
        (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
        cases[name] = Case(name, reference, ChatTokenizer(folder))
    return cases[name]


def as_json(messages):
    """Messages with calls as DeepSeek's templates want them: arguments in JSON, no content."""
    made = json.loads(json.dumps(messages))
    for message in (one for one in made if "tool_calls" in one):
        message["content"] = None
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return made


def plain(text):
    """A text without empty and opened blocks of reasoning, ends of calls that a template leaves open, and spaces."""
    text = text.replace("<｜tool▁call▁end｜><｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>")
    return "".join(re.sub(r"</?think>|<\|channel\|>final<\|message\|>", "", text).split())


def ours(render, *arguments):
    try:
        return render(*arguments)
    except InputError as error:
        return error


def played(case, messages, tools):
    """Play a rollout by the orchestrator's runner; return its prompts, what was sampled, and the trajectory."""
    engine = ScriptedEngine([Say(case.sampled(messages, i, tools)) for i in answers_of(messages)])
    env, bounds = Talk(messages=messages, tools=tools), TokenBounds(8192, 512, 20, 60.0, 3)
    runner = EpisodeRunner(case.tokenizer, env, balancer_of(engine), RunStatus(), bounds)
    return engine.prompts, engine.outputs, ours(asyncio.run, runner.run(spec(), TokenBudget(1)))


@pytest.mark.parametrize("case", TEMPLATES, indirect=True)
def test_rollouts_and_demonstrations_have_the_tokens_of_transformers(case):
    branches = list[int]()
    for messages, tools in OF_ENVIRONMENTS:
        right = [case.right(messages[:i], tools) for i in answers_of(messages)]
        prompts, outputs, trajectory = played(case, messages, tools)
        if isinstance(trajectory, InputError):
            assert None in right or "role tool" in trajectory.detail or case.name in UNMATCHED, trajectory
            continue
        assert all(case.same(a, b) for a, b in zip(prompts, right, strict=True))
        check_trained(trajectory, prompts, outputs)
        check_demonstration(case, messages, tools, trajectory)
        branches.append(len(trajectory.branches))
    assert len(branches) >= 2 or case.name in UNMATCHED
    looks_back = case.tokenizer.looks_back(calls=False)
    assert bool(looks_back) == (case.name in {*LOOKING_BACK, *ALSO_LOOKING_BACK}), looks_back
    assert any(branches) == bool(looks_back) or case.name in UNMATCHED


def check_trained(trajectory, prompts, outputs):
    """Compare each turn's prompt and sampled ids with those of the model's calls."""
    trajectory.validate()
    trained = [
        (one.token_ids[: turn.start], one.token_ids[turn.start : turn.end])
        for one in trajectory.sequences()
        for turn in one.turns
        if turn.role == "assistant"
    ]
    for (before, ids), prompt, output in zip(trained, prompts, outputs, strict=True):
        assert np.array_equal(before, prompt)
        assert ids.tolist() == output
    assert trajectory.n_sampled == sum(map(len, outputs))


def check_demonstration(case, messages, tools, trajectory):
    """It has the rollout's tokens; if those are several sequences, only the last answer can be learned."""
    found = ours(render_demonstration, case.tokenizer, messages, tools)
    if isinstance(found, InputError):
        assert "the chat template" in found.detail
        assert trajectory.branches or "role tool" in found.detail, found
        last = [i == len(messages) - 1 for i in range(len(messages))]
        found = ours(render_demonstration, case.tokenizer, messages, tools, last)
        if isinstance(found, InputError):
            return
    else:
        assert not trajectory.branches
    (ids, mask), whole, ends = found, trajectory.sequences()[-1], case.tokenizer.end_ids
    if trajectory.branches:
        assert case.same(ids[: mask.index(1)], whole.token_ids[: whole.turns[-1].start].tolist())
        return
    rollout = whole.token_ids.tolist(), whole.loss_mask.tolist()
    assert case.same(ids, rollout[0])
    words = [[i for i, one in zip(*marked, strict=True) if one and i not in ends] for marked in (found, rollout)]
    assert case.same(*words)


@pytest.mark.parametrize("case", TEMPLATES, indirect=True)
def test_the_bridge_to_verl_continues_as_rollouts_do_or_refuses(case, reference):
    """It knows no conversation: an episode is one sequence there."""
    end = case.tokenizer.eos_id
    reference.chat_template = TEMPLATES[case.name]
    continuation, refused = Continuation(reference, {end}), []
    for message in (user(1), result(1)):
        right = ours(case.tokenizer.continue_after, [end], [message], [user(0), said(0)])
        try:
            found = continuation.after([end], [message])
        except NotWritten:
            refused.append(message["role"])
        else:
            assert isinstance(right, InputError) or case.same(found, right)
    assert refused or case.name not in LOOKING_BACK
    if "user" in refused and case.name not in {*LOOKING_BACK, *ALSO_LOOKING_BACK, *UNMATCHED}:
        assert isinstance(ours(case.tokenizer.continue_after, [end], [user(1)]), InputError)


@pytest.mark.parametrize("case", TEMPLATES, indirect=True)
def test_servers_have_the_tokens_of_transformers(case):
    """Tools that the template leaves out are described before."""
    for messages, tools in (*OF_ENVIRONMENTS, *OF_AGENTS):
        for i in answers_of(messages):
            found = ours(render, Asked(messages=messages[:i], tools=tools), case.tokenizer)
            written = ours(with_tools_written, case.tokenizer, messages[:i], tools)
            right = None if isinstance(written, InputError) else case.right(*written)
            if isinstance(found, InputError):
                assert right is None or "role tool" in found.detail, found
            else:
                assert found.ids == right


@pytest.mark.parametrize("case", TEMPLATES, indirect=True)
def test_calls_of_agents_are_continued_as_transformers_writes_them(case):
    tokenizer, changed = case.tokenizer, False
    for messages, tools in OF_AGENTS:
        answers = answers_of(messages)
        ids = ours(tokenizer.render_prompt, messages[: answers[0]], tools)
        for at, after in zip(answers, [*answers[1:], None], strict=True):
            right = case.right(messages[:at], tools)
            if isinstance(ids, HistoryChanged):
                changed, ids = True, tokenizer.render_prompt(messages[:at], tools)
            if isinstance(ids, InputError):
                assert right is None or "role tool" in ids.detail or case.name in UNMATCHED, ids
                break
            assert case.same(ids, right)
            if after:
                spoken = case.sampled(messages, at, tools)
                new = messages[at + 1 : after], messages[: at + 1], tools
                found = ours(tokenizer.continue_after, spoken, *new)
                ids = found if isinstance(found, InputError) else [*ids, *spoken, *found]
    assert not changed or tokenizer.looks_back()
    assert not changed or case.name in {*LOOKING_BACK, *ALSO_LOOKING_BACK, *WITH_CALLS}


@pytest.mark.parametrize("case", ["qwen3", "mistral 7B v0.3"], indirect=True)
def test_credit_by_turn_is_refused_where_episodes_have_several_sequences(case):
    config = RunConfig(model={"path": "m"}, data={"env": "sokoban"}, algorithm={"credit": "turn"})
    if case.name == "qwen3":
        check_turns(config, case.tokenizer)
        return
    with pytest.raises(ConfigError, match="changes earlier messages"):
        check_turns(config, case.tokenizer)
