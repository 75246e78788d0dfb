"""What was once said under other keys still means what it meant: in files, in runs, in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from shared import moved_keys
from shared.config import validate
from shared.errors import ConfigError
from shared.run import pinned


def algorithm(**grpo_config: Any) -> dict[str, Any]:
    loaded = validate({"model": {"path": "m"}, "data": {"env": "e"}, "grpo_config": grpo_config})
    assert set(loaded.tree["grpo_config"]) <= {"num_generations"}
    return loaded.config.algorithm.model_dump()


OLD = {"epsilon": 0.2, "epsilon_high": None, "loss_agg_mode": "token-mean", "beta": 0.0, "sampler_is": "none"}


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"beta": 0.1, "num_generations": 4}, {"name": "grpo", **OLD, "beta": 0.1}),
        ({"advantage_estimator": "rloo"}, {"name": "rloo", **OLD}),
        ({"advantage_estimator": "drgrpo"}, {"name": "drgrpo", **OLD}),
        ({"advantage_estimator": "drgrpo", "loss_agg_mode": "seq-mean-token-sum"}, {"name": "drgrpo"}),
        ({"loss_algo": "gspo-token"}, {"name": "gspo-token", "advantage_estimator": "grpo", **OLD}),
        ({"loss_algo": "gspo-token", "advantage_estimator": "rloo"}, {"advantage_estimator": "rloo", **OLD}),
        ({"loss_algo": "grpo", "sampler_is": "token", "sampler_is_threshold": 3.0}, {"sampler_is_threshold": 3.0}),
    ],
)
def test_a_file_with_the_old_keys_means_what_it_meant(old: dict[str, Any], now: dict[str, Any]):
    assert now.items() <= algorithm(**old).items()


def test_a_value_under_both_is_refused():
    tree = {"model": {"path": "m"}, "data": {"env": "e"}, "grpo_config": {"loss_algo": "grpo"}, "algorithm": {}}
    with pytest.raises(ConfigError, match=r"grpo_config\.loss_algo is now algorithm\.name"):
        validate(tree)


def test_settings_of_an_older_run_are_no_change():
    now = pinned.relevant(validate({"model": {"path": "m"}, "data": {"env": "e"}}).config)
    was = {key: value for key, value in now.items() if not key.startswith("algorithm.")}
    was |= {f"grpo_config.{key}": value for key, value in OLD.items()}
    was |= {
        "grpo_config.loss_algo": "grpo",
        "grpo_config.advantage_estimator": "grpo",
        "grpo_config.kl_loss_mode": "low_var_kl",
        "grpo_config.sampler_is_threshold": 2.0,
    }
    assert pinned.changes(was, now) == []
    assert pinned.in_force(((1, was),), 1)["algorithm.epsilon"] == 0.2
    later = pinned.in_force(((1, was), (4, {"algorithm.epsilon": 0.1})), 4)
    assert (later["algorithm.epsilon"], later["algorithm.name"]) == (0.1, "grpo")
    assert not any(key in later for key in was if key.startswith("grpo_config.") and key not in now)


def test_a_tree_without_old_keys_stays_as_it_is():
    for tree in ({}, {"grpo_config": {"num_generations": 4}}, {"grpo_config": None}, {"grpo_config": [1]}):
        assert moved_keys.in_tree(tree) == tree
