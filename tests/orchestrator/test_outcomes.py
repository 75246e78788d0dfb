"""The taxonomy: every class of error is in it, none of them ever becomes a reward, and whatever a
model does is data.
"""

import ast
import asyncio
import subprocess
import sys
from functools import cache
from pathlib import Path

import orjson
import pytest

from services.orchestrator.episodes import dispatch, environments, failures
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.turn import TokenBounds
from shared import codec, errors
from shared.clients.env import StepReply
from shared.errors import DecodeError, RateLimited, VolleyError
from shared.models import continuation
from shared.outcomes import ENDS, FAULTS, FILTERS
from shared.process.telemetry import REGISTRY
from shared.types import MAX_MESSAGE, Group
from tests.orchestrator.fakes import (
    Say,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    runner_of,
    spec,
    with_probes,
)
from tests.support.tokenizer import tiny_tokenizer
from tests.support.virtual_time import virtual_time
from volley_agents.sessions import failures as sessions
from volley_algorithms.teachers import client as teacher

PROJECT = Path(__file__).parents[2]
TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_id
TWO_ATTEMPTS = TokenBounds(context_length=256, max_response_length=16, max_turns=4, timeout_s=600.0, max_attempts=2)


@cache
def error_classes():
    """Names of all classes in the sources that descend from VolleyError. Those of Python's API end a command, never
    an episode.
    """
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for folder in ("services", "shared", "packages/*/volley_*")
        for file in PROJECT.glob(f"{folder}/**/*.py")
        if file.relative_to(PROJECT).parts[:2] != ("packages", "python")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found = {"VolleyError"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return frozenset(found)


def test_what_is_done_about_each_class():
    fails = (
        "ConfigError InputError DecodeError TooLarge PromptTooLong NotFound ModelNotFound Expired WrongMethod Forbidden"
    )
    named = {name: error(name) for name in error_classes()}
    assert {name for name, e in named.items() if e.action == "fail"} == {
        *fails.split(),
        *("Conflict", "Unauthorized", "HistoryChanged"),
        *("SessionOver", "ContextExceeded", "CallsUsedUp"),
        "MalformedAnswer",
        "PrefixBroken",
        "RewardRefused",
        "TeacherRefused",
        "UnknownFrame",
        "Untrainable",
    }
    assert {name for name, e in named.items() if e.action == "stop"} == {
        *("Fenced", "NonFinite", "ProcessLost", "RuleFailed"),
    }
    assert {name for name, e in named.items() if e.cause == "defect"} == {
        "VolleyError", "DecodeError", "MalformedAnswer", "Untrainable", "PrefixBroken", "NonFinite", "SandboxFailed",
        "GradingEnded", "NemoGymRefused", "OpenEnvRefused", "EpisodeChanged",
    }  # fmt: skip
    assert {name for name, e in named.items() if e.outage} == {
        *("ServiceUnreachable", "TlsFailed", "NotReady", "WeightsUnpublished", "EngineDied", "EpisodeLost"),
        "WrongVersion",
    }


def test_a_class_from_elsewhere_is_judged_like_its_ancestor():
    class Overheated(errors.Unavailable):
        pass

    assert Overheated("hot").transient
    assert Overheated.cause == "infrastructure"


READER = """
import sys
import orjson
import services.orchestrator.app
import volley_agents.sessions.wiring
import volley_algorithms.teachers.opening
from shared.errors import from_problem
for body in orjson.loads(sys.stdin.buffer.read()):
    again = from_problem(body["status"], body)
    print(type(again).__name__, again.action, again.detail, again.hint, sep="|")
"""


def test_every_class_survives_the_wire_to_another_process():
    """The reader is a process of its own that imports nothing but the orchestrator and its recorder, as in a run."""
    sent = [type(error(name))(f"detail of {name}", "a hint") for name in sorted(error_classes())]
    read = subprocess.run(
        [sys.executable, "-c", READER],
        input=orjson.dumps([errors.problem(one) for one in sent]),
        capture_output=True,
        check=True,
        cwd=PROJECT,
    ).stdout.decode()
    assert read.splitlines() == [f"{type(one).__name__}|{one.action}|{one.detail}|{one.hint}" for one in sent]


@pytest.mark.parametrize(
    ("status", "name"),
    [(404, "NotFound"), (418, "InputError"), (429, "RateLimited"), (500, "VolleyError"), (503, "Unavailable")],
)
def test_an_unknown_class_becomes_the_nearest_known_one(status, name):
    again = errors.from_problem(status, {"type": "urn:volley:FromTheFuture", "status": status, "detail": "new"})
    assert (type(again).__name__, again.detail) == (name, "new")


def error(name):
    modules = (errors, failures, teacher, sessions, continuation)
    return next(getattr(module, name) for module in modules if hasattr(module, name))("planted")


async def group_with(name, place, n_failures):
    """The group of a ticket whose siblings meet an error `n_failures` times at one place."""
    planted = [error(name) for _ in range(n_failures)]
    env = ScriptedEnv(n_turns=2, **{f"{place}_failures": planted} if place != "generate" else {})
    balancer = balancer_of(*(ScriptedEngine(failures=planted if place == "generate" else []) for _ in range(2)))
    return await with_probes(balancer, run_group(dispatcher_of(env, balancer, TWO_ATTEMPTS), plan(2), 1, spec().need))


async def groups_with(place, n_failures):
    names = [
        name for name in error_classes() if not isinstance(error(name), RateLimited)
    ]  # those are waited for, see test_episode
    async with asyncio.TaskGroup() as tasks:
        found = {name: tasks.create_task(group_with(name, place, n_failures)) for name in names}
    return {name: task.result() for name, task in found.items()}


@pytest.mark.parametrize("place", ["create", "step", "generate"])
@virtual_time
async def test_an_error_that_stays_fails_the_group_and_is_never_a_reward(place, monkeypatch):
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(environments, "_AGAIN_S", 0.0)
    for name, group in (await groups_with(place, 1000)).items():
        lost = place == "step" and name in ("NotFound", "ModelNotFound", "Conflict")
        assert group.trajectories == ()
        assert str(group.failure).split()[0] == ("EpisodeLost" if lost else name)


@pytest.mark.parametrize("place", ["create", "step", "generate"])
@virtual_time
async def test_an_error_that_passes_costs_an_attempt_if_it_may_pass_and_the_group_otherwise(place):
    for name, group in (await groups_with(place, 1)).items():
        lost = place == "step" and name in ("NotFound", "ModelNotFound", "Conflict")
        if error(name).transient or lost:
            expected = "EpisodeLost" if lost else name
            assert group.failure is None, name
            assert sum(t.attempt for t in group.trajectories) == (not error(expected).outage)
            assert [dict(t.failures) for t in group.trajectories if t.failures] == [{expected: 1}]
            assert all(t.reward == 2.0 for t in group.trajectories)
        else:
            assert (str(group.failure).split()[0], group.trajectories) == (name, ())


def ending(fault=None, terminated=True):
    return ScriptedEnv(respond=lambda _: StepReply([], 0.5, terminated, not terminated, fault=fault))


MODELS = {
    "answered": (ending(), []),
    "format": (ending("format"), []),
    "invalid_action": (ending("invalid_action"), []),
    "tool": (ending("tool"), []),
    "length": (ending(), [Say([50] * 99)]),
    "context": (ScriptedEnv(n_turns=9, reply="long " * 60), []),
    "turns": (ScriptedEnv(n_turns=99), []),
}


@pytest.mark.parametrize("end", ENDS)
async def test_whatever_ends_an_episode_on_the_models_side_is_data(end):
    env, script = MODELS[end]
    trajectory = await runner_of(env, balancer_of(ScriptedEngine(script))).run(spec(), TokenBudget(1))
    trajectory.validate()
    assert trajectory.end == end
    assert trajectory.reward > 0
    assert trajectory.status == ("truncated" if end in ("length", "context", "turns") else "completed")
    assert trajectory.faults == ({end: 1} if end in FAULTS else {})


async def test_a_turn_that_fills_the_context_ends_with_the_context():
    bounds = TokenBounds(context_length=60, max_response_length=64, max_turns=4, timeout_s=600.0, max_attempts=1)
    trajectory = await runner_of(ending("format"), balancer_of(ScriptedEngine([Say([50] * 99)])), bounds).run(
        spec(), TokenBudget(1)
    )
    assert (trajectory.end, trajectory.status, trajectory.faults) == ("context", "truncated", {"format": 1})


@pytest.mark.parametrize(
    ("script", "terminated", "status"),
    [
        ([Say([50] * 99), Say([5, EOS])], True, "completed"),
        ([Say([5, EOS]), Say([50] * 99)], True, "truncated"),
        ([Say([5, EOS]), Say([50] * 15 + [EOS])], True, "completed"),  # as long as it may be, and whole
        ([Say([5, EOS]), Say([5, EOS])], False, "truncated"),
    ],
)
async def test_the_last_turn_decides_whether_an_episode_is_truncated(script, terminated, status):
    replies = iter([StepReply([], 0.0, False, False), StepReply([], 1.0, terminated, not terminated, success=True)])
    env = ScriptedEnv(respond=lambda _: next(replies))
    trajectory = await runner_of(env, balancer_of(ScriptedEngine(script))).run(spec(), TokenBudget(1))
    assert (trajectory.status, trajectory.success) == (status, True)
    assert Group.decode(Group(1, "e", "t", (trajectory,)).encode()).trajectories[0].status == status


async def test_faults_of_all_turns_are_counted():
    faults = iter(["format", None, "tool", "format"])
    env = ScriptedEnv(respond=lambda _: StepReply([], 0.0, False, False, fault=next(faults)))
    trajectory = await runner_of(env, balancer_of(ScriptedEngine([Say([50] * 99)]))).run(spec(), TokenBudget(1))
    assert (trajectory.end, trajectory.faults) == ("turns", {"format": 2, "tool": 1, "length": 1})


async def test_text_beyond_what_the_environment_takes_is_cut_and_no_failure():
    env = ScriptedEnv(n_turns=1)
    ids = TOKENIZER.encode("word " * 230_000)
    bounds = TokenBounds(context_length=10**6, max_response_length=10**6, max_turns=1, timeout_s=60.0, max_attempts=1)
    trajectory = await runner_of(env, balancer_of(ScriptedEngine([Say([*ids, EOS])])), bounds).run(
        spec(), TokenBudget(1)
    )
    assert len(env.texts[0]) == MAX_MESSAGE
    assert trajectory.n_sampled == len(ids) + 1


async def test_the_wire_carries_the_outcome_and_old_records_are_read():
    group = await group_with("ServiceUnreachable", "step", 1)
    again = Group.decode(group.encode())
    assert [(t.end, t.faults, t.failures) for t in again.trajectories] == [
        (t.end, t.faults, t.failures) for t in group.trajectories
    ]
    record = codec.unpack(group.encode())
    for trajectory in record["trajectories"]:
        for name in ("end", "faults", "failures"):
            del trajectory[name]
    assert {(t.end, len(t.faults), len(t.failures)) for t in Group.decode(codec.pack(record)).trajectories} == {
        (None, 0, 0)
    }
    for wrong in ("bored", 7, ["answered"]):
        record["trajectories"][0]["end"] = wrong
        with pytest.raises(DecodeError):
            Group.decode(codec.pack(record))


WATCHED = {
    "volley_episodes_total": {"purpose": "train", "end": "answered"},
    "volley_failed_attempts_total": {"error": "VolleyError"},
    "volley_failed_attempt_tokens_sum": {"error": "VolleyError"},
    "volley_episode_tokens_count": {"end": "answered"},
}


async def test_prometheus_tells_classes_and_lengths():
    def read():
        return {name: REGISTRY.get_sample_value(name, labels) or 0 for name, labels in WATCHED.items()}

    engine, env = (
        ScriptedEngine([Say([60, 61, 62, EOS])]),
        ScriptedEnv(n_turns=2, step_failures=[VolleyError("a defect")]),
    )
    before = read()
    await dispatcher_of(env, balancer_of(engine)).episode(spec(), "train")
    after = read()
    assert [after[name] - before[name] for name in WATCHED] == [1, 1, 4, 1]


def test_the_page_lists_every_class():
    page = (PROJECT / "docs" / "failures.md").read_text(encoding="utf-8")
    for name in [*error_classes(), *ENDS, *FAULTS, *FILTERS]:
        assert f"`{name}`" in page, name
