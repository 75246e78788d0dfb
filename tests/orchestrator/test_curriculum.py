"""Shares that follow what there is to learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from services.orchestrator.mixture.curriculum import Curriculum, factors_after
from services.orchestrator.tallies import EnvironmentTallies
from shared import config
from shared.data_schema import CurriculumConfig
from shared.errors import ConfigError, QueueUnavailable
from shared.types import Group, WeightVersion
from tests.orchestrator.mixtures import MixtureUnderTest, row
from tests.support.small_run import group

EVERY = CurriculumConfig(every_groups=16, floor=0.1)


def scored(env: str, *successes: bool) -> Group:
    one = group(1, WeightVersion(1, 0)).trajectories[0]
    return Group(1, env, "t", tuple(replace(one, success=success) for success in successes))


def tallied(env: str, tallies: EnvironmentTallies, *groups: tuple[bool, ...]) -> None:
    for successes in groups:
        tallies.published(scored(env, *successes))


def test_the_learnability_of_groups_is_an_unbiased_estimate_of_the_variance_of_success():
    """Over all outcomes of a group of three whose samples succeed with probability p, each as likely as it is."""
    for p in (0.1, 0.5, 0.8):
        expected = 0.0
        for outcome in product((False, True), repeat=3):
            tallies = EnvironmentTallies()
            tallied("a", tallies, outcome)
            likelihood = np.prod([p if success else 1 - p for success in outcome])
            expected += float(likelihood) * tallies["a"].learnability
        assert expected == pytest.approx(p * (1 - p), abs=1e-12)


def test_what_is_solved_or_hopeless_keeps_the_floor_and_what_is_half_solved_has_all():
    tallies = EnvironmentTallies()
    curriculum = Curriculum(EVERY, tallies)
    for env, outcome in (("solved", (True, True)), ("hopeless", (False, False)), ("half", (True, False))):
        tallied(env, tallies, *[outcome] * 8)
    assert curriculum.judged() == {"solved": 0.1, "hopeless": 0.1, "half": 1.0}


def test_half_of_the_tasks_always_solved_and_half_never_is_nothing_to_learn():
    tallies = EnvironmentTallies()
    curriculum = Curriculum(EVERY, tallies)
    tallied("split", tallies, *[(True, True), (False, False)] * 8)
    assert curriculum.judged() == {"split": 0.1}


def test_it_is_judged_every_so_many_groups_by_environments_of_which_enough_is_known():
    tallies = EnvironmentTallies()
    curriculum = Curriculum(EVERY, tallies)
    tallied("a", tallies, *[(True, True)] * 9)
    tallied("b", tallies, *[(True, False)] * 6)
    assert curriculum.judged() == {}
    tallied("b", tallies, (True, False))
    assert curriculum.judged() == {"a": 0.1}
    curriculum.settled()
    assert curriculum.judged() == {}
    curriculum.settled()
    tallied("b", tallies, *[(True, False)] * 16)
    assert curriculum.judged() == {"a": 0.1, "b": 1.0}


def test_factors_stay_until_one_has_moved_far_enough():
    assert factors_after({"a": 0.14}, {"a": 0.1, "b": 0.97}, ["a", "b"]) == {"a": 0.14}
    assert factors_after({"a": 0.16}, {"a": 0.1, "b": 0.97}, ["a", "b"]) == {"a": 0.1, "b": 0.97}
    assert factors_after({"a": 0.1, "b": 0.2}, {"a": 0.15}, ["a", "b"]) == {"a": 0.15, "b": 0.2}
    assert factors_after({"a": 0.16, "gone": 0.5}, {"a": 1.0}, ["a"]) == {}


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


@pytest.mark.parametrize("wrong", ["{floor: 0}", "{floor: 0.001}", "{floor: 1.5}", "{every_groups: 0}", "{pace: 1}"])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"data\.curriculum"):
        config.load(["configs/quickstart.yaml"], [f"data.curriculum={wrong}"])
