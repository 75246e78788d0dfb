"""One episode, token by token: whatever the model and the environment do, the trajectory's invariants hold."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import (
    EpisodeLost,
    EpisodeTimeout,
    PrefixBroken,
    PromptTooLong,
    WrongVersion,
)
from services.orchestrator.episodes.recorder import Recorder
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.clients.env import StepReply
from shared.clients.rollout import Generation
from shared.errors import Conflict, NotFound, RateLimited, Unavailable
from shared.models.chat import ChatTokenizer
from shared.types import VersionSpan, WeightVersion
from tests.orchestrator.fakes import (
    BOUNDS,
    Say,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    runner_of,
    spec,
    unreachable,
    with_probes,
)
from tests.support.templates import tiny_folder, write_json
from tests.support.tokenizer import tiny_tokenizer
from tests.support.virtual_time import virtual_time

TOKENIZER = tiny_tokenizer()
EOS, PAD = TOKENIZER.eos_id, TOKENIZER.pad_id


def play(env, engine, bounds=BOUNDS, budget=None, need=None):
    return asyncio.run(
        runner_of(env, balancer_of(engine), bounds).run(spec(need=need), budget or TokenBudget(bounds.max_attempts))
    )


def sampled(trajectory):
    return trajectory.token_ids[trajectory.loss_mask.astype(bool)].tolist()


answers = st.builds(
    Say,
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=24).flatmap(
        lambda ids: st.sampled_from([ids, [*ids, EOS]])
    ),
    finish=st.sampled_from(["stop", "length", "abort"]),
    versions=st.sampled_from([(), ("e000001-s000000",), ("e000001-s000000", "e000001-s000001")]),
)
replies = st.builds(
    StepReply,
    messages=st.lists(
        st.builds(
            lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), st.text(max_size=20)
        ),
        max_size=2,
    ),
    reward=st.floats(-2, 2),
    terminated=st.booleans(),
    truncated=st.booleans(),
    success=st.booleans(),
    reward_components=st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1, 1)),
)


@given(
    script=st.lists(answers, max_size=20),
    steps=st.lists(replies, min_size=1, max_size=6),
    prompt=st.text(max_size=40),
    context=st.integers(90, 300),
    response=st.integers(1, 20),
    max_turns=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_invariants_of_any_conversation(script, steps, prompt, context, response, max_turns):
    queue = list(steps)
    env = ScriptedEnv(prompt=prompt, respond=lambda _: queue.pop(0) if queue else StepReply([], 0.0, True, False))
    engine = ScriptedEngine(script=list(script))
    trajectory = play(env, engine, TokenBounds(context, response, max_turns, 5.0, 3))

    trajectory.validate()
    n = len(trajectory.token_ids)
    assert n < context
    assert sampled(trajectory) == [i for ids in engine.outputs for i in ids]
    for prompt_ids in engine.prompts:
        assert trajectory.token_ids[: len(prompt_ids)].tolist() == prompt_ids.tolist()
    assistant = [t for t in trajectory.turns if t.role == "assistant"]
    assert len(assistant) == len(env.texts) <= max_turns
    assert all(t.end - t.start <= response for t in assistant)
    assert [t.start for t in trajectory.turns] == [0, *[t.end for t in trajectory.turns[:-1]]]
    assert trajectory.turns[-1].end == n
    assert trajectory.reward == pytest.approx(sum(step.reward for step in steps[: len(assistant)]))
    assert not env.open


def test_the_text_the_environment_gets_is_what_was_sampled_without_its_end():
    env = ScriptedEnv(n_turns=1)
    play(env, ScriptedEngine([Say([*TOKENIZER.encode("go <answer>Right</answer>"), EOS])]))
    assert env.texts == ["go <answer>Right</answer>"]


def test_a_conversation_reads_as_the_template_writes_it():
    env = ScriptedEnv(n_turns=2, prompt="one", reply="two")
    trajectory = play(env, ScriptedEngine([Say([*TOKENIZER.encode("A"), EOS]), Say([*TOKENIZER.encode("B"), EOS])]))
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "two"},
    ]
    assert TOKENIZER.decode(trajectory.token_ids) == TOKENIZER.decode(
        TOKENIZER.render_prompt(messages)
    ) + "B" + TOKENIZER.decode([EOS])
    assert trajectory.status == "completed"
    assert trajectory.success
    assert trajectory.reward == 2.0
    assert trajectory.reward_components == {"turn": 2.0}
    assert {"env_s", "generate_s", "total_s"} == set(trajectory.timings)


SCORED = StepReply([], 0.5, False, True, False, {"judge": 0.5})


def test_an_episode_that_a_bound_of_ours_ends_is_scored_where_its_end_is():
    """By the turns, and by the context; one that its environment ends has its score from there."""
    for env, status in (
        (ScriptedEnv(n_turns=9, end=SCORED), "truncated"),
        (ScriptedEnv(n_turns=9, reply="long " * 60, end=SCORED), "truncated"),
        (ScriptedEnv(n_turns=1, end=SCORED), "completed"),
    ):
        trajectory = play(env, ScriptedEngine())
        given = 0.5 if status == "truncated" else 0.0
        n_turns = len([turn for turn in trajectory.turns if turn.role == "assistant"])
        assert trajectory.status == status
        assert trajectory.reward == n_turns + given
        assert trajectory.reward_components.get("judge", 0.0) == given
        assert [turn.reward for turn in trajectory.turns if turn.role == "assistant"][-1] == 1.0 + given


@pytest.mark.parametrize("solved", [True, False])
def test_an_episode_that_a_bound_of_ours_ends_may_have_solved_its_task(solved: bool):
    """The environment judges an episode that a bound of the run ends."""
    judged = StepReply([], float(solved), False, True, solved, {"reward": float(solved)})
    for reply in ("next", "long " * 60):
        trajectory = play(ScriptedEnv(n_turns=9, reply=reply, end=judged), ScriptedEngine())
        assert (trajectory.success, trajectory.status) == (solved, "truncated")


def test_a_turn_cut_by_length_is_closed_by_the_environment():
    engine = ScriptedEngine([Say([50] * 99), Say([51, EOS])])
    trajectory = play(ScriptedEnv(n_turns=2), engine)
    first = trajectory.turns[1]
    assert first.end - first.start == BOUNDS.max_response_length
    assert trajectory.token_ids[first.end] == EOS
    assert trajectory.loss_mask[first.end] == 0


def test_a_full_context_truncates_before_the_environment_speaks_again():
    env = ScriptedEnv(n_turns=9, reply="long " * 60)
    trajectory = play(env, ScriptedEngine())
    assert trajectory.status == "truncated"
    assert trajectory.turns[-1].role == "assistant"


def test_the_last_allowed_turn_truncates():
    trajectory = play(ScriptedEnv(n_turns=99), ScriptedEngine())
    assert trajectory.status == "truncated"
    assert sum(t.role == "assistant" for t in trajectory.turns) == BOUNDS.max_turns


def test_a_prompt_longer_than_the_context_has_its_own_failure():
    env = ScriptedEnv(prompt="x " * 500)
    with pytest.raises(PromptTooLong, match="context 256"):
        play(env, ScriptedEngine())
    assert not env.open


def test_a_turn_aborted_by_a_weight_update_goes_on_under_the_new_version():
    engine = ScriptedEngine(
        [Say([60, 61], "abort", ("e000001-s000000",)), Say([62, EOS], "stop", ("e000001-s000001",))]
    )
    trajectory = play(ScriptedEnv(n_turns=1), engine)
    start = trajectory.prompt_len
    assert sampled(trajectory) == [60, 61, 62, EOS]
    assert trajectory.versions == (
        VersionSpan("e000001-s000000", start, start + 2),
        VersionSpan("e000001-s000001", start + 2, start + 4),
    )
    assert engine.params[1]["max_new_tokens"] == BOUNDS.max_response_length - 2
    assert engine.params[0]["sampling_seed"] != engine.params[1]["sampling_seed"]


def test_endless_aborts_are_an_infrastructure_failure():
    with pytest.raises(Unavailable, match="cut short"):
        play(ScriptedEnv(), ScriptedEngine([Say([], "abort")] * 100))


def test_a_dead_server_costs_no_attempt():
    dead, alive = ScriptedEngine(failures=unreachable()), ScriptedEngine()
    env, balancer, budget = ScriptedEnv(n_turns=3), balancer_of(dead, alive), TokenBudget(1)
    trajectory = asyncio.run(runner_of(env, balancer).run(spec(), budget))
    assert (budget.used, trajectory.attempt, len(env.created)) == (0, 0, 1)
    assert trajectory.failures == {"ServiceUnreachable": 1}
    assert len(alive.prompts) == 3
    assert balancer.servers[0].out


@pytest.mark.parametrize("error", [NotFound("no episode"), Conflict("failed before")])
def test_an_environment_that_forgot_the_episode_is_an_infrastructure_failure(error):
    env = ScriptedEnv(step_failures=[error])
    with pytest.raises(EpisodeLost):
        play(env, ScriptedEngine())
    assert not env.open


@virtual_time
async def test_a_deadline_aborts_the_request_and_deletes_the_episode():
    env, engine = ScriptedEnv(), ScriptedEngine(delay_s=30)
    with pytest.raises(EpisodeTimeout):
        await runner_of(env, balancer_of(engine), TokenBounds(256, 16, 4, 0.05, 3)).run(spec(), TokenBudget(3))
    assert set(engine.aborted) == engine.running != set()
    assert not env.open


@virtual_time
async def test_an_episode_whose_making_is_cancelled_is_deleted():
    env = ScriptedEnv(delay_s=0.05)
    task = asyncio.ensure_future(runner_of(env, balancer_of(ScriptedEngine())).run(spec(), TokenBudget(3)))
    await asyncio.sleep(0.01)
    assert env.open
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not env.open


@virtual_time
async def test_cancellation_passes_and_leaves_nothing_open():
    env, engine = ScriptedEnv(), ScriptedEngine(delay_s=30)
    task = asyncio.ensure_future(runner_of(env, balancer_of(engine)).run(spec(), TokenBudget(3)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted
    assert not env.open


@pytest.mark.parametrize("other", ["e000001-s000001", "e000000-s000000"])
def test_tokens_of_a_wrong_version_are_asked_for_again_where_one_is_asked_for(other):
    """Weights that are too new, and weights that a later trainer undid."""
    wrong, right = ScriptedEngine([Say([60, 61, EOS], versions=("e000001-s000000", other))]), ScriptedEngine()
    balancer = balancer_of(wrong, right)
    balancer.set_target(WeightVersion(1, 0), ((1, 0),))
    budget = TokenBudget(3)
    trajectory = asyncio.run(
        runner_of(ScriptedEnv(n_turns=1), balancer).run(spec(need=VersionBounds(0, 0, strict=True)), budget)
    )
    assert budget.failures == trajectory.failures == {"WrongVersion": 1}
    assert {span.version for span in trajectory.versions} == {"e000001-s000000"}
    assert [bool(server.out) for server in balancer.servers] == [True, False]  # until a probe tells what it has now
    wrong.script.append(Say([60], versions=(other,)))
    balancer.remove("http://engine1")
    balancer.observe(balancer.servers[0], WeightVersion(1, 0))
    wrong.script += [Say([60], versions=(other,))] * 9
    running = runner_of(ScriptedEnv(), balancer).run(spec(need=VersionBounds(0, 0, strict=True)), TokenBudget(1))
    with pytest.raises(WrongVersion):
        asyncio.run(with_probes(balancer, running))


def test_the_same_spec_repeats_itself():
    runs = [play(ScriptedEnv(n_turns=3), ScriptedEngine(), budget=TokenBudget(9, used)) for used in (0, 2)]
    assert runs[0].token_ids.tolist() == runs[1].token_ids.tolist()


def test_a_changed_prefix_is_never_sent():
    recorder = Recorder([1, 2, 3])
    recorder.prompt()
    recorder.add_sampled(
        Generation(np.array([4], np.int32), np.array([-1], np.float32), (VersionSpan("e000001-s000000", 0, 1),), "stop")
    )
    recorder._ids[1] = 9
    with pytest.raises(PrefixBroken):
        recorder.prompt()


def test_a_long_environment_text_is_tokenized_off_the_loop():
    env = ScriptedEnv(n_turns=2, reply="word " * 5000)
    trajectory = play(env, ScriptedEngine(), TokenBounds(60_000, 16, 4, 20.0, 3))
    assert trajectory.status == "completed"


def test_failures_of_the_environment_are_raised_with_their_class():
    with pytest.raises(Unavailable, match="no worker"):
        play(ScriptedEnv(create_failures=[Unavailable("no worker") for _ in range(3)]), ScriptedEngine())


def test_a_step_that_was_not_answered_is_asked_again_and_counts_once():
    env, budget = ScriptedEnv(n_turns=2, step_failures=unreachable(), not_ready=1), TokenBudget(3)
    trajectory = play(env, ScriptedEngine(), budget=budget)
    assert (len(env.created), len(env.texts), budget.used) == (1, 2, 0)
    assert trajectory.failures == {"ServiceUnreachable": 1}


def test_an_environment_that_restarts_is_one_outage():
    env, budget = ScriptedEnv(step_failures=[*unreachable(), NotFound("restarted")]), TokenBudget(3)
    with pytest.raises(EpisodeLost) as lost:
        play(env, ScriptedEngine(), budget=budget)
    budget.count_failure(lost.value)  # as the dispatcher does
    assert (budget.used, budget.outages.n) == (0, 1)
    assert budget.failures == {"ServiceUnreachable": 1}


@virtual_time
async def test_an_outage_within_an_episode_counts_once_however_long_it_is():
    impatient = TokenBounds(256, 16, 4, 0.3, 3)
    env, engine, budget = (
        ScriptedEnv(step_failures=unreachable(), not_ready=1),
        ScriptedEngine(failures=unreachable()),
        TokenBudget(3),
    )
    balancer = balancer_of(engine)
    asyncio.get_running_loop().call_later(0.6, balancer.observe, balancer.servers[0], WeightVersion(1, 0))
    await runner_of(env, balancer, impatient).run(spec(), budget)
    assert (budget.failures, len(env.created)) == ({"ServiceUnreachable": 2}, 1)


def test_being_told_to_wait_costs_no_attempt():
    waits = [RateLimited("full", retry_after_s=0.001) for _ in range(9)]
    env, engine, budget = (
        ScriptedEnv(create_failures=waits[:3], step_failures=waits[3:6]),
        ScriptedEngine(failures=waits[6:]),
        TokenBudget(3),
    )
    balancer = balancer_of(engine)
    asyncio.run(runner_of(env, balancer).run(spec(), budget))
    assert budget.used == 0
    assert not balancer.servers[0].out


async def test_an_episode_that_may_not_begin_yet_has_all_its_time_while_the_service_is_not_ready():
    deadlines: list[float | None] = []

    class Full(ScriptedEnv):
        async def ready(self):
            assert budget.timer is not None
            deadlines.append(budget.timer.when())
            await super().ready()

    waits = [RateLimited("no engine", retry_after_s=0.001) for _ in range(2)]
    env, budget = Full(create_failures=waits[:1], step_failures=waits[1:], not_ready=1), TokenBudget(3)
    await runner_of(env, balancer_of(ScriptedEngine())).run(spec(), budget)
    assert (deadlines, budget.used) == ([None, None], 0)


@pytest.mark.parametrize("silent", [set(), {2}, {3}])
def test_the_experts_of_a_position_are_those_of_the_first_request_that_told_them(silent):
    """Three turns, and one of them cut in two parts: every position but the last has experts, from one request each."""
    engine = ScriptedEngine([Say([60, 61], finish="abort"), Say([62, EOS])], tells_no_experts=silent)
    env, bounds = ScriptedEnv(n_turns=3), BOUNDS
    routed = replace(spec(), routing=True)
    trajectory = asyncio.run(runner_of(env, balancer_of(engine), bounds).run(routed, TokenBudget(3)))
    found, ends, asked = [], [], 0
    for number, (prompt, said) in enumerate(zip(engine.prompts, engine.outputs, strict=True), start=1):
        assert engine.routed_from[number - 1] == asked
        if number not in silent:
            asked = len(prompt) + len(said) - 1
            found.append(number)
            ends.append(asked)
    assert trajectory.routed_experts is not None
    assert len(engine.prompts) == 4
    expected = np.repeat(found, np.diff([0, *ends]))
    np.testing.assert_array_equal(
        trajectory.routed_experts, np.broadcast_to(expected[:, None, None], (len(expected), 2, 3))
    )
    assert len(expected) == len(trajectory.token_ids) - 1


def test_nobody_asks_for_experts_of_a_model_without_any():
    engine = ScriptedEngine()
    assert play(ScriptedEnv(n_turns=2), engine).routed_experts is None
    assert engine.routed_from == [None, None]


def test_another_declared_end_ends_a_turn_and_stays_as_it_was_sampled(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    write_json(folder / "generation_config.json", {"eos_token_id": [EOS, PAD]})
    env, engine = ScriptedEnv(n_turns=2), ScriptedEngine([Say([60, 61, PAD]), Say([62, EOS])])
    runner = EpisodeRunner(ChatTokenizer(folder), env, balancer_of(engine), RunStatus(), BOUNDS)
    trajectory = asyncio.run(runner.run(spec(), TokenBudget(3)))
    assert env.texts == [TOKENIZER.decode([60, 61]), TOKENIZER.decode([62])]
    first = trajectory.turns[1]
    assert trajectory.token_ids[first.start : first.end + 1].tolist() == [60, 61, PAD, EOS]
    assert trajectory.loss_mask[first.start : first.end + 1].tolist() == [1, 1, 1, 0]
    assert (trajectory.end, trajectory.faults) == ("answered", {})
    assert engine.params[0]["stop_token_ids"] == [PAD, EOS]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("closed", [True, False])
def test_an_episode_is_deleted_unless_its_service_forgets_it(end, closed):
    flags = {"terminated": False, "truncated": False, end: True}
    env = ScriptedEnv(respond=lambda _: StepReply([], 1.0, **flags, closed=closed))
    play(env, ScriptedEngine([Say([5, EOS])]))
    assert bool(env.open) is closed
