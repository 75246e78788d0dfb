"""Episodes are shown to a teacher before they are published: what it says is part of them, and what it does not say is
never data.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from services.orchestrator import disk
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.errors import RateLimited, StorageFull, VolleyError
from shared.files.spending import SpendingStore
from shared.services_schema import OrchestratorEndpoint
from shared.teacher_view import TeacherLogprobs
from shared.types import Branch, Group, VersionSpan
from tests.orchestrator.fakes import BOUNDS, ScriptedEngine, ScriptedEnv, balancer_of, plan, runner_of, spec
from tests.support.virtual_time import virtual_time
from volley_algorithms.teachers import teaching as episode_teacher
from volley_algorithms.teachers.client import TeacherAway, TeacherFailed, TeacherRefused, TeacherUnusable
from volley_algorithms.teachers.teaching import EpisodeTeaching, TeachingBudget, TeachingByEnvironment


@dataclass
class ScriptedTeacher:
    """-t/100 at position t; raises what `failures` holds first."""

    failures: list[VolleyError] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def logprobs(self, ids: np.ndarray, start: int) -> TeacherLogprobs:
        self.asked.append((len(ids), start))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if self.failures:
            raise self.failures.pop(0)
        return TeacherLogprobs(-np.arange(start, len(ids), dtype=np.float32) / 100)


def dispatcher_with(
    teacher: ScriptedTeacher, engine: ScriptedEngine, max_concurrent: int = 8, budget: TeachingBudget | None = None
) -> Dispatcher:
    status, balancer = RunStatus(), balancer_of(engine)
    return Dispatcher(
        runner_of(ScriptedEnv(), balancer),
        balancer,
        status,
        slots=Slots(64),
        max_attempts=BOUNDS.max_attempts,
        teaching=EpisodeTeaching(teacher, status, max_concurrent, budget),
    )


async def test_what_the_teacher_says_of_sampled_tokens_travels_with_the_episode() -> None:
    teacher = ScriptedTeacher()
    group = await run_group(dispatcher_with(teacher, ScriptedEngine()), plan(4), 1, spec().need)
    for one in Group.decode(group.encode()).trajectories:
        assert one.teacher_logprobs is not None
        sampled = np.flatnonzero(one.loss_mask)
        np.testing.assert_allclose(one.teacher_logprobs[sampled], -sampled / 100, rtol=1e-6)
        assert not one.teacher_logprobs[one.loss_mask == 0].any()
        assert (len(one.token_ids), one.prompt_len) in teacher.asked
        assert (one.attempt, dict(one.failures)) == (0, {})
    assert len(teacher.asked) == 4


async def test_the_teacher_of_an_environment_grades_its_episodes_within_its_own_budget(tmp_path: Path) -> None:
    maths, others, status = ScriptedTeacher(), ScriptedTeacher(), RunStatus()
    plain = await dispatcher_with(others, ScriptedEngine()).episode(spec(), "eval")
    servers = OrchestratorEndpoint.model_validate(
        {"teacher": {"url": "http://a"}, "teachers": {"maths": {"url": "http://b"}}}
    )
    with SpendingStore(tmp_path / "teacher.sqlite3") as store:
        budgets = {key: TeachingBudget(store, 1, None, key) for key in servers.all_teachers()}
        of = {
            key: EpisodeTeaching(teacher, status, 8, budgets[key])
            for key, teacher in zip(servers.all_teachers(), (others, maths), strict=True)
        }
        teaching = TeachingByEnvironment(servers.teacher_of, of)
        for env, asked in (("maths@1f2e", (1, 0)), ("chess", (1, 1))):
            taught = await teaching.add_logprobs(replace(plain, env=env), TokenBudget(4))
            assert taught.teacher_logprobs is not None
            assert (len(maths.asked), len(others.asked)) == asked
        with pytest.raises(TeacherRefused) as caught:
            await teaching.add_logprobs(replace(plain, env="maths"), TokenBudget(4))
        assert "teachers.maths.max_requests" in caught.value.hint
    with pytest.raises(TeacherRefused):
        await TeachingByEnvironment(lambda _: None, {}).add_logprobs(plain, TokenBudget(4))


async def test_each_sequence_of_an_episode_is_shown_whole_and_scored_from_its_first_sampled_token() -> None:
    teacher, status = ScriptedTeacher(), RunStatus()
    plain = await dispatcher_with(teacher, ScriptedEngine()).episode(spec(), "eval")
    n, ids, mask = len(plain.token_ids), np.arange(3, dtype=np.int32), np.array([0, 1, 1], np.uint8)
    span = VersionSpan(plain.versions[0].version, n, n + 2)
    branch = Branch(0, n - 1, ids, mask, np.float32([0, -1, -2]), (span,), ())
    teacher.failures.append(TeacherFailed("x"))
    budget = TokenBudget(3)
    taught = await EpisodeTeaching(teacher, status, 8).add_logprobs(replace(plain, branches=(branch,)), budget)
    assert teacher.asked == [(n, plain.prompt_len)] * 2 + [(n + 2, n)]
    assert (taught.attempt, taught.branches[0].parent) == (1, 0)
    assert taught.branches[0].teacher_logprobs is not None
    np.testing.assert_allclose(taught.branches[0].teacher_logprobs, [0, -n / 100, -(n + 1) / 100], rtol=1e-6)
    assert taught.teacher_logprobs is not None
    assert len(taught.teacher_logprobs) == n


async def test_an_evaluation_asks_no_teacher() -> None:
    teacher = ScriptedTeacher()
    evaluated = await dispatcher_with(teacher, ScriptedEngine()).episode(spec(), "eval")
    assert evaluated.teacher_logprobs is None
    assert not teacher.asked


@pytest.mark.parametrize("error", [TeacherFailed("x"), TeacherUnusable("x"), VolleyError("x")])
async def test_a_failure_that_passes_costs_an_attempt_but_not_the_episode(error: VolleyError) -> None:
    teacher, engine = ScriptedTeacher([error, error]), ScriptedEngine()
    one = await dispatcher_with(teacher, engine).episode(spec(), "train")
    assert (one.attempt, dict(one.failures)) == (2, {type(error).__name__: 2})
    assert len(engine.prompts) == 2, "the episode was played again"
    assert teacher.asked[0] == teacher.asked[1] == teacher.asked[2]


@pytest.mark.parametrize("error", [RateLimited("full", retry_after_s=0.0), TeacherAway("gone", retry_after_s=0.0)])
async def test_waiting_for_the_teacher_costs_nothing(
    error: VolleyError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_teacher, "_AGAIN_S", 1e-4)
    monkeypatch.setattr(episode_teacher, "_MOST_S", 1e-3)
    teacher = ScriptedTeacher([error] * 20)
    with SpendingStore(tmp_path / "run" / "teacher.sqlite3") as store:
        one = await dispatcher_with(teacher, ScriptedEngine(), budget=TeachingBudget(store, 1, None)).episode(
            spec(), "train"
        )
        assert store.spent("teacher") == (1, len(one.token_ids))
    assert (one.attempt, dict(one.failures), len(teacher.asked)) == (0, {}, 21)


@virtual_time
async def test_while_the_teacher_is_away_the_others_wait_behind_those_that_ask() -> None:
    teacher = ScriptedTeacher([TeacherAway("gone")] * 10**6)
    dispatcher = dispatcher_with(teacher, ScriptedEngine(), max_concurrent=2)
    running = asyncio.ensure_future(run_group(dispatcher, plan(8), 1, spec().need))
    await asyncio.sleep(0.5)
    assert 2 <= len(teacher.asked) <= 8, "each after a pause that grows"
    running.cancel()
    await asyncio.wait([running])


async def test_a_full_disk_under_the_budget_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_RETRY_S", 0.01)
    full = [StorageFull("no room")] * 5

    class FullBudget(TeachingBudget):
        def spend(self, n_tokens: int) -> None:
            if full:
                raise full.pop()
            super().spend(n_tokens)

    with SpendingStore(tmp_path / "run" / "teacher.sqlite3") as store:
        dispatcher = dispatcher_with(ScriptedTeacher(), ScriptedEngine(), budget=FullBudget(store, None, None))
        one = await dispatcher.episode(spec(), "train")
    assert (one.attempt, full) == (0, [])


@pytest.mark.parametrize(("error", "asked"), [(TeacherRefused("a wrong key"), 1), (TeacherUnusable("NaN"), 3)])
async def test_a_teacher_that_stays_wrong_fails_the_group_by_name(error: VolleyError, asked: int) -> None:
    teacher = ScriptedTeacher([error] * 100)
    group = await run_group(dispatcher_with(teacher, ScriptedEngine()), plan(1), 1, spec().need)
    assert (str(group.failure).split()[0], group.trajectories) == (type(error).__name__, ())
    assert len(teacher.asked) == asked


async def test_so_many_questions_at_once_and_no_more() -> None:
    teacher = ScriptedTeacher()
    await run_group(dispatcher_with(teacher, ScriptedEngine(), max_concurrent=2), plan(8), 1, spec().need)
    assert teacher.most_at_once == 2


async def test_who_waits_for_the_teacher_says_so() -> None:
    teacher, status = ScriptedTeacher([TeacherAway("gone")] * 10**6), RunStatus()
    balancer = balancer_of(ScriptedEngine())
    teaching = EpisodeTeaching(teacher, status, 1)
    dispatcher = Dispatcher(
        runner_of(ScriptedEnv(), balancer), balancer, status, slots=Slots(1), max_attempts=3, teaching=teaching
    )
    running = asyncio.ensure_future(dispatcher.episode(spec(), "train"))
    while status.waits != {"teacher": 1} or not teacher.asked:
        await asyncio.sleep(0.005)
    teacher.failures.clear()
    assert (await running).attempt == 0
    assert status.waits == {}


async def test_a_budget_that_is_used_up_fails_the_group_and_no_restart_gives_it_back(tmp_path: Path) -> None:
    async def played(budget: TeachingBudget, ticket: int) -> Group:
        status, balancer = RunStatus(), balancer_of(ScriptedEngine())
        teaching = EpisodeTeaching(ScriptedTeacher(), status, 8, budget)
        dispatcher = Dispatcher(
            runner_of(ScriptedEnv(), balancer), balancer, status, slots=Slots(8), max_attempts=3, teaching=teaching
        )
        return await run_group(dispatcher, plan(2), ticket, spec().need)

    with SpendingStore(tmp_path / "run" / "teacher.sqlite3") as store:
        first = await played(TeachingBudget(store, 3, None), 1)
        assert first.failure is None
        n_tokens = sum(len(one.token_ids) for one in first.trajectories)
        assert store.spent("teacher") == (2, n_tokens)
    with SpendingStore(tmp_path / "run" / "teacher.sqlite3") as store:
        for limits in ((2, None), (None, n_tokens)):
            assert (await played(TeachingBudget(store, *limits), 2)).failure.split()[0] == "TeacherRefused"
        assert store.spent("teacher") == (2, n_tokens)
