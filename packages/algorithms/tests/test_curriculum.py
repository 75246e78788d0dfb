"""Shares that follow what there is to learn."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from services.orchestrator.app import open_orchestrator
from services.orchestrator.mixture.suspension import Suspensions
from services.orchestrator.settings import from_config
from services.orchestrator.tallies import EnvironmentTallies
from shared import config, own_rules, rule_code
from shared.data_schema import CurriculumConfig
from shared.errors import ConfigError, QueueUnavailable, RuleFailed
from shared.run import rule_files
from shared.types import Group, WeightVersion
from tests.orchestrator.mixtures import MixtureUnderTest, row
from tests.orchestrator.test_component import run_config
from tests.support.small_run import group
from volley_algorithms.curriculum import EnvironmentCurriculum, rule_of

EVERY = CurriculumConfig(every_groups=16, floor=0.1)


def scored(env: str, *successes: bool) -> Group:
    one = group(1, WeightVersion(1, 0)).trajectories[0]
    return Group(1, env, "t", tuple(replace(one, success=success) for success in successes))


def tallied(env: str, tallies: EnvironmentTallies, *groups: tuple[bool, ...]) -> None:
    for successes in groups:
        tallies.published(scored(env, *successes))


def judged(curriculum: EnvironmentCurriculum, *envs: str) -> dict[str, float]:
    return asyncio.run(curriculum.judged({}, dict.fromkeys(envs, 0))) if curriculum.is_due else {}


def test_the_learnability_of_groups_is_an_unbiased_estimate_of_the_variance_of_success():
    """Over all outcomes of a group of three whose samples succeed with probability p, each as likely as it is."""
    for p in (0.1, 0.5, 0.8):
        expected = 0.0
        for outcome in product((False, True), repeat=3):
            tallies = EnvironmentTallies()
            tallied("a", tallies, outcome)
            likelihood = np.prod([p if success else 1 - p for success in outcome])
            (score,) = tallies["a"].recent
            expected += float(likelihood) * score.learnability
        assert expected == pytest.approx(p * (1 - p), abs=1e-12)


def test_what_is_solved_or_hopeless_keeps_the_floor_and_what_is_half_solved_has_all():
    tallies = EnvironmentTallies()
    curriculum = EnvironmentCurriculum(EVERY, tallies)
    for env, outcome in (("solved", (True, True)), ("hopeless", (False, False)), ("half", (True, False))):
        tallied(env, tallies, *[outcome] * 8)
    assert judged(curriculum, "solved", "hopeless", "half") == {"solved": 0.1, "hopeless": 0.1, "half": 1.0}


def test_half_of_the_tasks_always_solved_and_half_never_is_nothing_to_learn():
    tallies = EnvironmentTallies()
    curriculum = EnvironmentCurriculum(EVERY, tallies)
    tallied("split", tallies, *[(True, True), (False, False)] * 8)
    assert judged(curriculum, "split") == {"split": 0.1}


def test_it_is_judged_every_so_many_groups_by_environments_of_which_enough_is_known():
    tallies = EnvironmentTallies()
    curriculum = EnvironmentCurriculum(EVERY, tallies)
    tallied("a", tallies, *[(True, True)] * 9)
    tallied("b", tallies, *[(True, False)] * 6)
    assert judged(curriculum, "a", "b") == {}
    tallied("b", tallies, (True, False))
    assert judged(curriculum, "a", "b") == {"a": 0.1}
    curriculum.settled()
    assert judged(curriculum, "a", "b") == {}
    curriculum.settled()
    tallied("b", tallies, *[(True, False)] * 16)
    assert judged(curriculum, "a", "b") == {"a": 0.1, "b": 1.0}


def test_factors_stay_until_one_has_moved_far_enough():
    after = EnvironmentCurriculum(EVERY, EnvironmentTallies()).after
    assert after({"a": 0.14}, {"a": 0.1, "b": 0.97}, ["a", "b"]) == {"a": 0.14}
    assert after({"a": 0.16}, {"a": 0.1, "b": 0.97}, ["a", "b"]) == {"a": 0.1, "b": 0.97}
    assert after({"a": 0.1, "b": 0.2}, {"a": 0.15}, ["a", "b"]) == {"a": 0.15, "b": 0.2}
    assert after({"a": 0.16, "gone": 0.5}, {"a": 1.0}, ["a"]) == {}


async def test_the_run_plays_more_of_what_can_be_learned_and_says_why(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, curriculum=EVERY)
    await run.look()
    assert Counter(await run.play(40)) == {"frozen_lake": 20, "sokoban": 20}
    tallied("frozen_lake", run.status.by_env, *[(True, True)] * 8)
    tallied("sokoban", run.status.by_env, *[(True, False)] * 8)
    await run.look()
    assert Counter(await run.play(110)) == {"frozen_lake": 10, "sokoban": 100}
    (change,) = run.lines()
    assert change.factors == {"frozen_lake": 0.1}
    assert change.why == "curriculum: frozen_lake 0.1, sokoban 1"
    tallied("frozen_lake", run.status.by_env, *[(True, False)] * 15)
    await run.look()
    assert len(run.lines()) == 1  # the next time is 16 groups later


async def test_what_was_judged_while_the_queue_was_away_is_put_in_force_later(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, curriculum=EVERY)
    await run.look()
    tallied("frozen_lake", run.status.by_env, *[(True, True)] * 16)
    run.queue.away = True
    with pytest.raises(QueueUnavailable):
        await run.look()
    run.queue.away = False
    await run.look()
    assert run.lines()[-1].factors == {"frozen_lake": 0.1}


async def test_a_persons_weight_is_multiplied_and_a_canarys_share_is_fixed(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, curriculum=EVERY)
    await run.look(row("adder@1", "canary"))
    assert await run.play(1) == ["adder@1"]
    for env, outcome in (("frozen_lake", (True, True)), ("sokoban", (True, False)), ("adder@1", (True, True))):
        tallied(env, run.status.by_env, *[outcome] * 8)
    await run.look()
    await run.mixture.choose({"frozen_lake": 90})
    assert Counter(await run.play(400)) == {"frozen_lake": 342, "sokoban": 38, "adder@1": 20}


async def test_a_restart_keeps_the_factors_and_its_end_gives_the_weights_back(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, curriculum=EVERY)
    await run.look()
    tallied("frozen_lake", run.status.by_env, *[(True, True)] * 16)
    await run.look()
    tasks = await run.tasks(60)
    again = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, curriculum=EVERY, queue=run.queue)
    await again.look()
    assert await again.tasks(60) == tasks
    assert len(again.lines()) == 1
    without = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "sokoban": 1}, queue=run.queue)
    await without.look()
    assert without.lines()[-1].factors == {}
    assert Counter(await without.play(20)) == {"frozen_lake": 10, "sokoban": 10}


def own(folder: Path, body: str, **settings: int) -> CurriculumConfig:
    """A rule of a function's body, whose argument is m."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "import itertools\nimport numpy as np\n\ncount = itertools.count()\n"
    (folder / "rule.py").write_text(f"{head}\ndef rule(m):\n{lines}", encoding="utf-8")
    named = {"data": {"curriculum": {"custom": f"{folder}/rule.py:rule"}}}
    return CurriculumConfig(custom=rule_files.resolved(named, folder)[own_rules.CURRICULUM], **settings)


WRONG = {
    "returned list": "return [1.0]",
    "returned a factor for 'tetris'": "return {'tetris': 1.0}",
    "returned -1 for sokoban": "return {'sokoban': -1}",
    "returned (np.float64.)?nan.? for sokoban": "return {'sokoban': m.envs['sokoban'].success.mean()}",
    "returned '1' for sokoban": "return {'sokoban': '1'}",
    "returned 0 for every environment": "return dict.fromkeys(m.envs, 0)",
    "is not deterministic": "return {'sokoban': next(count)}",
    "raised IndexError at line 7": "return {'sokoban': m.envs['sokoban'].success[-1]}",
    "raised ModuleNotFoundError at line 7: No module named 'jax'": "import jax",
    "raised ValueError at line 7: .*read-only": "m.envs['sokoban'].success[:] = 0\nreturn {}",
    "raised TypeError at line 7": "m.envs['sokoban'] = None",
}


@pytest.mark.parametrize(("why", "body"), WRONG.items())
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_a_rule_that_lacks_a_property_is_refused_by_its_name(tmp_path, why, body):
    with pytest.raises(ConfigError, match=f"data.curriculum.custom.*rule.py:rule .sha256 .*{why}"):
        rule_of(own(tmp_path, body), ["frozen_lake", "sokoban"])


async def test_a_rule_of_ones_own_decides_the_shares_and_a_restart_keeps_them(tmp_path):
    """It counts the run's tickets, and leaves an environment out until then."""
    body = "n = sum(one.tickets for one in m.envs.values())\nreturn {'sokoban': 3 if n > 40 else 0}"
    settings = {"members": {"frozen_lake": 1, "sokoban": 1}, "curriculum": own(tmp_path, body, every_groups=2)}
    run = MixtureUnderTest(tmp_path, **settings)
    await run.look()
    assert Counter(await run.play(10)) == {"frozen_lake": 5, "sokoban": 5}
    tallied("frozen_lake", run.status.by_env, *[(True, False)] * 2)
    await run.look()
    assert Counter(await run.play(40)) == {"frozen_lake": 40}
    again = MixtureUnderTest(tmp_path, **settings, queue=run.queue)
    await again.look()
    assert await again.tasks(50) == await run.tasks(50)
    tallied("frozen_lake", again.status.by_env, *[(True, False)] * 2)
    await again.look()
    assert Counter(await again.play(40)) == {"frozen_lake": 10, "sokoban": 30}
    assert [one.factors for one in again.lines()] == [{"sokoban": 0.0}, {"sokoban": 3.0}]


async def test_small_factors_count_by_their_proportions(tmp_path):
    body = "n = sum(one.tickets for one in m.envs.values())\nreturn {'frozen_lake': 2e-5, 'sokoban': n * 1e-6}"
    settings = {"members": {"frozen_lake": 1, "sokoban": 1}, "curriculum": own(tmp_path, body, every_groups=1)}
    run = MixtureUnderTest(tmp_path, **settings)
    await run.look()
    await run.play(20)
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert Counter(await run.play(40)) == {"frozen_lake": 20, "sokoban": 20}
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert Counter(await run.play(40)) == {"frozen_lake": 10, "sokoban": 30}
    assert [one.factors["sokoban"] for one in run.lines()] == [2e-5, 6e-5]


async def test_if_nobody_can_play_what_the_rule_wants_the_weights_count_without_it(tmp_path):
    body = "return {'frozen_lake': 0, 'sokoban': 0, 'tetris': 1}"
    members = {"frozen_lake": 1, "sokoban": 3, "tetris": 1}
    run = MixtureUnderTest(tmp_path, members=members, curriculum=own(tmp_path, body, every_groups=1))
    await run.look()
    tallied("sokoban", run.status.by_env, (True, False))
    await run.look()
    assert await run.play(8) == ["tetris"] * 8
    await run.mixture.choose({"tetris": 0})
    assert Counter(await run.play(8)) == {"frozen_lake": 2, "sokoban": 6}

    assert run.lines()[-1].why == (
        "asked for: tetris 0; tetris left; the curriculum has no factor above 0 for any of them: weights without it"
    )
    await run.look()
    assert len(run.lines()) == 2
    assert run.mixture.set_aside("sokoban", "gone")
    await run.look()
    assert await run.play(4) == ["frozen_lake"] * 4
    await run.mixture.choose({"tetris": 1})
    assert await run.play(4) == ["tetris"] * 4


STOPPED = "return {'adder@1': 0 if 4 < m.envs['frozen_lake'].tickets < 9 else 1} if 'adder@1' in m.envs else {}"


async def test_an_environment_whose_factor_was_0_is_still_of_the_mixture(tmp_path):
    run = MixtureUnderTest(tmp_path, curriculum=own(tmp_path, STOPPED, every_groups=1))
    await run.look(row("adder@1"))
    assert Counter(await run.play(11)) == {"frozen_lake": 5, "adder@1": 6}
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert await run.play(4) == ["frozen_lake"] * 4
    assert run.mixture.evaluated() == {"adder@1": 4}
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert [(one.first, one.why) for one in run.lines()] == [
        (("adder@1",), "adder@1 joined"),
        ((), "curriculum: adder@1 0, frozen_lake 1"),
        ((), "curriculum: adder@1 1, frozen_lake 1"),
    ]
    await run.look(row("adder@1", "retired"))
    assert run.lines()[-1].why == "adder@1 left"


async def test_a_suspension_outlasts_the_factor_0_and_ends_by_a_trial(tmp_path):
    now = [0.0]
    settings = {"curriculum": own(tmp_path, STOPPED, every_groups=1), "suspensions": Suspensions(lambda: now[0])}
    run = MixtureUnderTest(tmp_path, **settings)
    await run.look(row("adder@1"))
    await run.play(11)
    assert run.mixture.set_aside("adder@1", "gone")
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    now[0] = 1000
    await run.look()
    assert await run.play(4) == ["frozen_lake"] * 4
    assert run.lines()[-1].suspended == {"adder@1": "gone"}
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert await run.play(4) == ["adder@1"] + ["frozen_lake"] * 3
    run.mixture.ended("adder@1", failed=False, ticket=run.queue.issued - 3)
    await run.look()
    assert Counter(await run.play(4)) == {"adder@1": 2, "frozen_lake": 2}
    assert run.lines()[-1].why == "adder@1 is back"


async def test_a_newcomer_with_the_factor_0_has_joined_and_is_not_played(tmp_path):
    run = MixtureUnderTest(tmp_path, curriculum=own(tmp_path, STOPPED, every_groups=1))
    await run.look()
    await run.play(5)
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look(row("adder@1"))
    assert await run.play(4) == ["frozen_lake"] * 4
    assert run.lines()[-1].why == "adder@1 joined; curriculum: adder@1 0, frozen_lake 1"
    assert run.mixture.evaluated() == {"adder@1": 4}
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.look()
    assert Counter(await run.play(4)) == {"adder@1": 2, "frozen_lake": 2}


async def test_a_persons_weight_does_not_wait_for_the_rule(tmp_path):
    body = "if m.envs['frozen_lake'].tickets == 8:\n    raise KeyError('here')\nreturn {}"
    members = {"frozen_lake": 1, "sokoban": 1}
    run = MixtureUnderTest(tmp_path, members=members, curriculum=own(tmp_path, body, every_groups=1))
    await run.look()
    await run.play(16)
    tallied("frozen_lake", run.status.by_env, (True, False))
    await run.mixture.choose({"sokoban": 3})
    assert run.lines()[-1].why == "asked for: sokoban 3"
    with pytest.raises(RuleFailed, match="KeyError"):
        await run.look()


async def test_a_rule_that_fails_later_ends_the_run(tmp_path):
    body = "if m.envs['frozen_lake'].tickets == 7:\n    raise KeyError('here')\nreturn {}"
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1}, curriculum=own(tmp_path, body, every_groups=1))
    await run.look()
    await run.play(7)
    tallied("frozen_lake", run.status.by_env, (True, False))
    with pytest.raises(RuleFailed, match=r"rule.py:rule .sha256 .* raised KeyError at line 8: 'here'"):
        await run.mixture.watch()


async def test_a_rule_that_takes_too_long_fails_by_its_name_and_stalls_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_code, "LONGEST_S", 0.2)
    body = "if m.envs['frozen_lake'].tickets == 7:\n    import threading\n    threading.Event().wait(2)\nreturn {}"
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1}, curriculum=own(tmp_path, body, every_groups=1))
    await run.look()
    await run.play(7)
    tallied("frozen_lake", run.status.by_env, (True, False))
    looking = asyncio.ensure_future(run.look())
    await asyncio.sleep(0.01)
    assert not looking.done()
    with pytest.raises(RuleFailed, match=r"the rule of data.curriculum.custom took more than 0.2 s"):
        await looking


def test_dump_prefers_large_advantages_and_little_known_environments():
    named = {"data": {"curriculum": {"custom": "dump.py:curriculum"}}}
    text = rule_files.resolved(named, Path("examples/rules"))[own_rules.CURRICULUM]
    tallies = EnvironmentTallies()
    for env, outcome in (("solved", (True, True)), ("half", (True, False)), ("rare", (True, False))):
        tallied(env, tallies, *[outcome] * 8)
    curriculum = EnvironmentCurriculum(CurriculumConfig(custom=text), tallies, ["solved", "half", "rare"])
    found = asyncio.run(curriculum.judged({}, {"solved": 100, "half": 100, "rare": 20}))
    a = float(np.abs((np.array([1, 0]) - 0.5) / np.std([1, 0])).mean())
    score = {"solved": bonus(100), "half": a + bonus(100), "rare": a + bonus(20)}
    assert found == {env: pytest.approx(np.exp((one - score["rare"]) / 0.5), abs=1e-4) for env, one in score.items()}


def bonus(tickets: int) -> float:
    return float(np.sqrt(2 * np.log(221) / (tickets + 1)))


@pytest.mark.parametrize("wrong", ["{floor: 0}", "{floor: 0.001}", "{floor: 1.5}", "{every_groups: 0}", "{pace: 1}"])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"data\.curriculum"):
        config.load(["configs/quickstart.yaml"], [f"data.curriculum={wrong}"])


async def test_an_orchestrator_does_not_start_with_a_curriculum_that_fails(tmp_path: Path) -> None:
    made = from_config(run_config(tmp_path, services={"redis_url": "redis://127.0.0.1:1/0"}))
    settings = replace(made, curriculum=own(tmp_path, "return None"), model_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"data\.curriculum\.custom"):
        async with open_orchestrator(settings):
            pass
