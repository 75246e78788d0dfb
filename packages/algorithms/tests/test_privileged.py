"""A privileged teacher sees what the policy does not know: the same tokens after another prompt, nothing made up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.context import EpisodeContext
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.clients.env import StepReply
from shared.errors import DecodeError, RateLimited, Unavailable, VolleyError
from shared.models.chat import ChatTokenizer
from shared.teacher_view import TeacherPrompt, TeacherView
from shared.types import Group, Trajectory, WeightVersion
from tests.orchestrator.fakes import BOUNDS, Say, ScriptedEngine, ScriptedEnv, balancer_of, plan, spec
from tests.support.looking_back import LOOKING_BACK
from tests.support.templates import tiny_folder
from tests.support.tokenizer import tiny_tokenizer
from volley_algorithms.teachers.client import TeacherFailed
from volley_algorithms.teachers.own_servers import OwnServers
from volley_algorithms.teachers.privileged import PrivilegedTeaching
from volley_algorithms.teachers.teaching import EpisodeTeaching

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_id


def say(text: str) -> Say:
    return Say([*TOKENIZER.encode(text), EOS])


@dataclass
class Course:
    """A run with the group's teacher on its own servers. `answers` are the texts that end an episode, with rewards."""

    templates: Sequence[str] = ("{sibling}",)
    rewards: Mapping[str, float] | None = None
    hints: Mapping[str, str] | None = None
    n_turns: int = 1
    bounds: TokenBounds = BOUNDS
    tokenizer: ChatTokenizer = TOKENIZER
    prompt: str = "play"

    def play(self, *engines: ScriptedEngine, n: int = 1, max_tokens: int | None = None) -> Group:
        balancer, status = balancer_of(*engines), RunStatus()
        env, played = ScriptedEnv(prompt=self.prompt), list[str]()

        def respond(text: str) -> StepReply:
            played.append(text)
            over = len(played) % self.n_turns == 0
            messages = [] if over else [{"role": "user", "content": f"next {len(played)}"}]
            reward = (self.rewards or {}).get(text, 0.0)
            return StepReply(messages, reward, over, False, reward > 0, hints=self.hints or {})

        env.respond = respond
        runner = EpisodeRunner(self.tokenizer, env, balancer, status, self.bounds)
        dispatcher = Dispatcher(runner, balancer, status, slots=Slots(1), max_attempts=3)
        longest = self.bounds.context_length - 1 if max_tokens is None else max_tokens
        teaching = PrivilegedTeaching(
            EpisodeTeaching(OwnServers(balancer, 5.0), status, 4), self.tokenizer, self.templates, longest, 3
        )
        made = replace(plan(n), privileged=lambda _: teaching)
        return asyncio.run(run_group(dispatcher, made, 1, spec().need))


def shown(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist())


def test_the_answer_stays_token_for_token_behind_a_prompt_with_the_expected_answer():
    engine = ScriptedEngine([say("four")])
    (one,) = Course(["It is {expected}.", "{feedback}"], hints={"expected": "four"}).play(engine).trajectories
    ((asked, start),) = engine.scored
    (prompt,) = one.teacher_view.prompts
    assert shown(TOKENIZER, prompt.token_ids) == shown(TOKENIZER, one.token_ids[: one.prompt_len]).replace(
        "play", "It is four.\n\nplay"
    )
    assert prompt.token_ids.tolist() == TOKENIZER.render_prompt([{"role": "user", "content": "It is four.\n\nplay"}])
    assert (prompt.replaces, prompt.version) == (one.prompt_len, str(engine.version))
    np.testing.assert_array_equal(asked, np.concatenate([prompt.token_ids, one.token_ids[one.prompt_len :]]))
    sampled = np.flatnonzero(one.loss_mask)
    moved = len(prompt.token_ids) - one.prompt_len
    assert start == sampled[0] + moved
    np.testing.assert_allclose(one.teacher_logprobs[sampled], -(sampled + moved) / 100, rtol=1e-6)
    assert not one.teacher_logprobs[one.loss_mask == 0].any()


def test_each_turn_of_an_episode_is_scored_at_its_place():
    engine = ScriptedEngine([say("a"), say("bb"), say("c")])
    (one,) = Course(["{prompt} ({feedback})"], hints={"feedback": "hot"}, n_turns=3).play(engine).trajectories
    ((asked, start),) = engine.scored
    (prompt,) = one.teacher_view.prompts
    assert "play (hot)" in shown(TOKENIZER, asked)
    moved = len(prompt.token_ids) - prompt.replaces
    sampled = np.flatnonzero(one.loss_mask)
    np.testing.assert_array_equal(asked[sampled + moved], one.token_ids[sampled])
    np.testing.assert_allclose(one.teacher_logprobs[sampled], -(sampled + moved) / 100, rtol=1e-6)
    assert start == sampled[0] + moved


@pytest.mark.parametrize("name", ["reminds in the last message", "system at the last user"])
def test_sequences_of_a_template_that_changes_earlier_messages_are_rendered_and_aligned(tmp_path: Path, name: str):
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", chat_template=LOOKING_BACK[name]))
    engine = ScriptedEngine([say(text) for text in ("a", "bb", "ccc")])
    course = Course(["<{expected}>"], hints={"expected": "hot"}, n_turns=3, tokenizer=tokenizer)
    (one,) = course.play(engine).trajectories
    sequences = one.sequences()
    assert len(sequences) == len(one.teacher_view.prompts) == len(engine.scored) == 3
    messages = [{"role": "user", "content": "<hot>\n\nplay"}]
    for number, (whole, prompt, (asked, start)) in enumerate(
        zip(sequences, one.teacher_view.prompts, engine.scored, strict=True)
    ):
        assert prompt.token_ids.tolist() == tokenizer.render_prompt(messages)
        moved, sampled = len(prompt.token_ids) - prompt.replaces, np.flatnonzero(whole.loss_mask)
        assert start == sampled[0] + moved
        np.testing.assert_array_equal(asked[sampled + moved], whole.token_ids[sampled])
        np.testing.assert_allclose(whole.teacher_logprobs[sampled], -(sampled + moved) / 100, rtol=1e-6)
        answer = tokenizer.message_text(whole.token_ids[sampled].tolist())
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"next {number + 1}"}]


def test_sequences_without_their_oldest_turns_begin_with_the_privileged_prompt():
    bounds = TokenBounds(70, 8, 30, 5.0, 3, drops_oldest=True)
    engine = ScriptedEngine([say(f"answer{n}") for n in range(6)])
    course = Course(["<{expected}>"], hints={"expected": "x"}, n_turns=6, bounds=bounds, prompt="rules")
    (one,) = course.play(engine, max_tokens=200).trajectories
    assert one.branches
    for whole, prompt in zip(one.sequences(), one.teacher_view.prompts, strict=True):
        assert shown(TOKENIZER, prompt.token_ids).count("<x>\n\nrules") == 1
        sampled, moved = np.flatnonzero(whole.loss_mask), len(prompt.token_ids) - prompt.replaces
        np.testing.assert_allclose(whole.teacher_logprobs[sampled], -(sampled + moved) / 100, rtol=1e-6)


def test_an_episode_is_shown_the_best_one_of_its_group_if_that_is_better():
    rewards = {"good": 1.0, "best": 2.0, "bad": 0.0}
    engine = ScriptedEngine([say(text) for text in ("bad", "best", "good", "best")])
    group = Course(["Try {sibling}"], rewards).play(engine, n=4)
    for one in group.trajectories:
        if one.reward == 2.0:
            assert (one.teacher_view, one.teacher_logprobs) == (TeacherView(lacks=("sibling",)), None)
        else:
            assert "Try best\n\nplay" in shown(TOKENIZER, one.teacher_view.prompts[0].token_ids)
    assert len(engine.scored) == 2
    again = Group.decode(group.encode())
    for one, other in zip(group.trajectories, again.trajectories, strict=True):
        assert one.teacher_view.to_wire().keys() == other.teacher_view.to_wire().keys()
        assert [p.token_ids.tolist() for p in one.teacher_view.prompts] == [
            p.token_ids.tolist() for p in other.teacher_view.prompts
        ]
        assert one.teacher_view.lacks == other.teacher_view.lacks
    assert again.teachers() == {engine.version}


def test_the_first_template_that_can_be_filled_is_used():
    engine = ScriptedEngine([say("bad"), say("good")])
    course = Course(["{sibling} and {expected}", "only {feedback}"], {"good": 1.0}, {"feedback": "cold"})
    for one in course.play(engine, n=2).trajectories:
        assert "only cold" in shown(TOKENIZER, one.teacher_view.prompts[0].token_ids)
    (one,) = Course(["{sibling} {expected}", "{feedback}"]).play(ScriptedEngine([say("x")])).trajectories
    assert one.teacher_view.lacks == ("expected", "feedback", "sibling")


def test_braces_of_a_text_that_is_filled_in_stay_as_they_are():
    engine = ScriptedEngine([say("x")])
    (one,) = Course(["{{{expected}}}"], hints={"expected": "{sibling}"}, prompt="{expected}").play(engine).trajectories
    assert "{{sibling}}\n\n{expected}" in shown(TOKENIZER, one.teacher_view.prompts[0].token_ids)


@pytest.mark.parametrize("n", [40, 400_000])
def test_what_does_not_fit_the_context_is_not_scored(n: int):
    engine = ScriptedEngine([say("x")])
    (one,) = Course(["{expected}"], hints={"expected": "y " * n}).play(engine, max_tokens=40).trajectories
    assert (one.teacher_view.lacks, one.teacher_logprobs, engine.scored) == (("context",), None, [])


def test_an_episode_of_an_agent_or_without_a_users_message_lacks_the_prompt():
    teaching = PrivilegedTeaching(
        EpisodeTeaching(OwnServers(balancer_of(), 1.0), RunStatus(), 1), TOKENIZER, ["{expected}"], 99, 3
    )
    one = Course().play(ScriptedEngine([say("x")])).trajectories[0]
    odd = EpisodeContext(prompts=[([{"role": "tool", "content": "x"}], 3)], hints={"expected": "y"})
    for context in (EpisodeContext(hints={"expected": "y"}), odd):
        (made,) = asyncio.run(teaching.teach([replace(one, teacher_view=None)], [context]))
        assert made.teacher_view == TeacherView(lacks=("prompt",))


def test_a_repeated_attempt_forgets_what_the_lost_one_knew():
    context = EpisodeContext()
    context.begin([{"role": "user", "content": "a"}], 3, ())
    context.answered("lost", {"expected": "1"})
    context.begin([{"role": "user", "content": "a"}], 3, ())
    context.answered("kept", {})
    assert (context.answers, context.hints) == (["kept"], {})


async def scored(*engines: ScriptedEngine, attempts: int = 3) -> tuple[Trajectory, TokenBudget]:
    """A plain episode, scored by the own servers."""
    balancer, status = balancer_of(*engines), RunStatus()
    one = await EpisodeRunner(TOKENIZER, ScriptedEnv(), balancer_of(ScriptedEngine()), status, BOUNDS).run(
        spec(), TokenBudget(1)
    )
    budget = TokenBudget(attempts)
    view = TeacherView((TeacherPrompt(np.arange(5, dtype=np.int32), one.prompt_len),))
    return await EpisodeTeaching(OwnServers(balancer, 5.0), status, 1).add_logprobs(one, budget, view), budget


async def test_another_server_answers_for_one_that_is_out_and_costs_no_attempt():
    newer = WeightVersion(1, 1)
    engine, other = ScriptedEngine(failures=[Unavailable("x")]), ScriptedEngine(version=newer)
    engine.failures[0] = type("Gone", (Unavailable,), {"outage": True})("gone")
    one, budget = await scored(engine, other)
    assert (budget.used, one.teacher_view.prompts[0].version) == (0, str(newer))


@pytest.mark.parametrize(("error", "used"), [(RateLimited("full", retry_after_s=0.0), 0), (VolleyError("odd"), 1)])
async def test_a_server_that_is_full_costs_nothing_and_a_failure_costs_an_attempt(error: VolleyError, used: int):
    engines = ScriptedEngine(failures=[error]), ScriptedEngine()
    _, budget = await scored(*engines)
    assert budget.used == used


async def test_a_server_that_is_slow_to_score_keeps_getting_turns_to_sample():
    slow = Unavailable("late")
    slow.__cause__ = TimeoutError()
    balancer = balancer_of(ScriptedEngine(failures=[slow]))
    with pytest.raises(TeacherFailed):
        await OwnServers(balancer, 1.0).logprobs(np.arange(5, dtype=np.int32), 2)
    assert balancer.why_unroutable() is None


@pytest.mark.parametrize(
    ("view", "is_scored"),
    [
        (TeacherView(), False),
        (TeacherView(lacks=("expected",)), True),
        (TeacherView((TeacherPrompt(np.arange(3, dtype=np.int32), 2),)), False),
        (TeacherView((TeacherPrompt(np.arange(3, dtype=np.int32), 9),)), True),
        (TeacherView((TeacherPrompt(np.arange(0, dtype=np.int32), 2),)), True),
        (TeacherView((TeacherPrompt(np.arange(3, dtype=np.int32), 2, "newest"),)), True),
        (TeacherView((TeacherPrompt(np.arange(3, dtype=np.int32), 2),) * 2), True),
    ],
)
def test_a_view_that_contradicts_itself_is_no_data(view: TeacherView, is_scored: bool):
    with pytest.raises(DecodeError):
        view.validate([9], is_scored=is_scored)
