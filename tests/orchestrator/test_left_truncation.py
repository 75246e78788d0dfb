"""Left truncation: the oldest turns leave the context, and each sampled token is stored and trained once."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import EpisodeLost
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.status import RunStatus
from shared import config
from shared.clients.env import StepReply
from shared.errors import ConfigError, NotFound
from shared.models.chat import ChatTokenizer
from shared.types import ASSISTANT, HISTORY, Group
from tests.orchestrator.fakes import Say, ScriptedEngine, ScriptedEnv, balancer_of, runner_of, spec
from tests.support.looking_back import LOOKING_BACK
from tests.support.templates import tiny_folder
from tests.support.tokenizer import tiny_tokenizer
from volley_proof.reverify.episodes import said

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_id


def play(env, engine, context, response=8, max_turns=30, *, routing=False, tokenizer=TOKENIZER):
    bounds = TokenBounds(context, response, max_turns, 5.0, 3, drops_oldest=True)
    one = replace(spec(), routing=routing)
    runner = EpisodeRunner(tokenizer, env, balancer_of(engine), RunStatus(), bounds)
    return asyncio.run(runner.run(one, TokenBudget(3)))


def say(text):
    return Say([*TOKENIZER.encode(text), EOS])


@pytest.fixture(scope="module", params=["appending", "reminds in the last message", "system at the last user"])
def tokenizer(request, tmp_path_factory):
    if request.param == "appending":
        return TOKENIZER
    folder = tmp_path_factory.mktemp("models") / "model"
    return ChatTokenizer(tiny_folder(folder, chat_template=LOOKING_BACK[request.param]))


@given(
    words=st.lists(st.text("abcdef", min_size=1, max_size=12), min_size=1, max_size=12),
    observations=st.lists(st.text("xyz ", max_size=40), min_size=12, max_size=12),
    context=st.integers(60, 160),
    response=st.integers(1, 16),
)
@settings(max_examples=50, deadline=None)
def test_every_sampled_token_is_stored_once_with_the_ids_that_it_followed(
    tokenizer, words, observations, context, response
):
    env = ScriptedEnv(n_turns=len(words), prompt="play")
    texts = iter(observations)
    steps = iter(range(1, 100))
    env.respond = lambda _: _reply(env, next(steps), next(texts))
    engine = ScriptedEngine([say(word) for word in words])
    trajectory = play(env, engine, context, response, routing=True, tokenizer=tokenizer)

    trajectory.validate()
    (again,) = Group.decode(Group(1, "e", "t", (replace(trajectory, ticket=1),)).encode()).trajectories
    assert len(again.branches) == len(trajectory.branches)
    sequences = trajectory.sequences()
    asked = []
    for one in sequences:
        assert len(one.token_ids) < context
        assert len(one.routed_experts) == len(one.token_ids) - 1
        turns = [turn for turn in one.turns if turn.role == ASSISTANT]
        assert int(one.loss_mask.sum()) == sum(turn.end - turn.start for turn in turns)
        asked += [
            (one.token_ids[: turn.start].tolist(), one.token_ids[turn.start : turn.end].tolist()) for turn in turns
        ]
    assert asked == [(p.tolist(), o) for p, o in zip(engine.prompts, engine.outputs, strict=True)]
    assert trajectory.n_sampled == sum(map(len, engine.outputs))
    assert trajectory.reward == len(env.texts)
    assert said(tokenizer, trajectory) == env.texts


def _reply(env, n, text):
    over, role = n >= env.n_turns, "tool" if n % 3 else "user"
    return StepReply([] if over else [{"role": role, "content": text}], 1.0, over, False, over)


def test_the_prompt_and_the_newest_turns_are_kept():
    env = ScriptedEnv(n_turns=6, prompt="rules", reply="o" * 10)
    engine = ScriptedEngine([say(f"answer{n}") for n in range(6)])
    trajectory = play(env, engine, context=100, response=16)
    assert (trajectory.status, trajectory.success) == ("completed", True)
    assert trajectory.branches
    prompt = trajectory.token_ids[: trajectory.prompt_len].tolist()
    for number, branch in enumerate(trajectory.branches, 1):
        assert (branch.parent, branch.shared) == (0, trajectory.prompt_len)
        assert branch.turns[0].role == HISTORY
        assert trajectory.sequences()[number].token_ids[: len(prompt)].tolist() == prompt
    text = TOKENIZER.decode(trajectory.sequences()[-1].token_ids.tolist())
    assert "rules" in text
    assert "answer5" in text
    assert "answer4" in text
    assert "answer0" not in text


def test_an_observation_that_does_not_fit_beside_the_prompt_ends_the_episode():
    env = ScriptedEnv(n_turns=6, prompt="rules", reply="o" * 200)
    trajectory = play(env, ScriptedEngine([say("a")]), context=100)
    assert (trajectory.status, trajectory.end, trajectory.branches) == ("truncated", "context", ())


def test_a_lost_episode_repeats_its_tokens_across_truncations():
    def played(failures):
        env = ScriptedEnv(n_turns=6, prompt="rules", reply="o" * 20)
        engine = ScriptedEngine()
        bounds = TokenBounds(90, 8, 30, 5.0, 3, drops_oldest=True)
        runner, budget = runner_of(env, balancer_of(engine), bounds), TokenBudget(3)
        calls = iter(range(100))
        real = env.step

        async def step(*given):
            if next(calls) in failures:
                raise NotFound("the service was restarted")
            return await real(*given)

        env.step = step
        while True:
            try:
                return asyncio.run(runner.run(spec(), budget)), engine
            except EpisodeLost as error:
                budget.count_failure(error)
                budget.start_attempt()

    plain, _ = played(())
    repeated, engine = played((4,))
    assert len(plain.branches) > 1
    assert [one.token_ids.tolist() for one in plain.sequences()] == [
        one.token_ids.tolist() for one in repeated.sequences()
    ]
    assert len(engine.outputs) == sum(turn.role == ASSISTANT for one in plain.sequences() for turn in one.turns)


def test_turns_that_begin_at_one_position_are_sampled_with_different_seeds():
    env = ScriptedEnv(n_turns=12, prompt="rules", reply="o" * 20)
    engine = ScriptedEngine([say("same")] * 12)
    play(env, engine, context=90)
    lengths = [len(ids) for ids in engine.prompts]
    assert len(set(lengths)) < len(lengths)
    assert len({params["sampling_seed"] for params in engine.params}) == len(engine.params)


def test_experts_continue_after_those_of_the_prompt():
    env = ScriptedEnv(n_turns=6, prompt="rules", reply="o" * 20)
    engine = ScriptedEngine()
    trajectory = play(env, engine, context=90, routing=True)
    assert trajectory.branches
    for one in trajectory.sequences():
        assert len(one.routed_experts) == len(one.token_ids) - 1
    for branch in trajectory.branches:
        assert len(branch.routed_experts) == len(branch.token_ids) - 1


def test_credit_by_turn_is_refused_with_left_truncation(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: m}\ndata: {env: sokoban}\nalgorithm: {credit: turn}\n"
        "orchestrator: {generation: {truncation: left}}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"truncation=left.*credit=turn"):
        config.load([path])
