"""What a step's metrics tell of how its episodes ended."""

from dataclasses import replace

import pytest

from services.trainer.groups.group_buffer import ready_group
from services.trainer.metrics.step_metrics import of_components, of_environments, of_groups
from shared.types import Group
from tests.trainer.support import group


def held(*changes):
    whole = group(1, "e000001-s000000", n=len(changes))
    trajectories = tuple(replace(t, **change) for t, change in zip(whole.trajectories, changes, strict=True))
    return [ready_group(Group(1, "toy", "t", trajectories), b"", "0-1")]


def test_shares_lengths_faults_and_failures_by_class():
    changed = (
        {"end": "answered", "failures": {"EpisodeLost": 2, "NoServer": 1}},
        {"end": "length", "faults": {"length": 1, "format": 2}},
        {"end": "length", "faults": {"length": 1}},
        {},
    )
    groups = held(*changed)
    lengths = [t.n_sampled for t in groups[0].group.trajectories]
    metrics = of_groups(groups, 0)
    assert metrics["ends"] == {"answered": 0.25, "completed": 0.25, "length": 0.5}
    assert metrics["end_tokens"]["length"] == pytest.approx((lengths[1] + lengths[2]) / 2)
    assert metrics["faults"] == {"format": 2, "length": 2}
    assert metrics["failed_attempts"] == {"EpisodeLost": 2, "NoServer": 1}
    assert metrics["retried_tokens"] == lengths[0]
    assert of_groups(held({}), 0)["retried_tokens"] is None


def test_environments_are_told_apart_where_there_is_another_than_the_main_one():
    lake, adder = (
        replace(group(1, "e000001-s000000", n=2), env="frozen_lake"),
        replace(group(2, "e000001-s000000", n=4), env="adder@2"),
    )
    adder = replace(
        adder, trajectories=tuple(replace(t, reward=0.5, success=i < 1) for i, t in enumerate(adder.trajectories))
    )
    assert of_environments([lake, lake], "frozen_lake") == {}
    found = of_environments([lake, adder, lake], "frozen_lake")
    assert {key: found[key] for key in found if "adder" in key} == {
        "env/adder@2/reward_mean": 0.5,
        "env/adder@2/success": 0.25,
        "env/adder@2/groups": 1,
    }
    assert found["env/frozen_lake/groups"] == 2
    assert of_environments([adder], "frozen_lake").keys() == {key for key in found if "adder" in key}


def test_components_of_the_rewards_have_their_means_where_there_are_several():
    groups = [one.group for one in held({"reward_components": {"a": 1.0}}, {"reward_components": {"a": 0.0, "b": 0.5}})]
    assert of_components(groups) == {"reward/a": 0.5, "reward/b": 0.25}
    assert of_components([one.group for one in held({"reward_components": {"a": 1.0}})]) == {}


def test_rewards_near_the_end_of_float64_have_a_finite_mean():
    metrics = of_groups(held({"reward": 1.7e308}, {"reward": 1.7e308}, {"reward": 1.6e308}), 0)
    assert metrics["reward_mean"] == pytest.approx(1.6667e308, rel=1e-3)
    assert 0 < metrics["reward_std"] < 1e308
