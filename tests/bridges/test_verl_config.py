"""The configuration map of the bridge to verl. It needs neither verl nor its environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shared.run_config import run_model
from shared.schema import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "bridges" / "verl"))

from volley_verl import config as bridge
from volley_verl.config_keys import ACTOR, VOLLEY_DEFAULTS
from volley_verl.settings import SettingsError

ADDRESSES: Mapping[str, Any] = {"env_url": "http://e", "servers": ["http://r"], "weights_dir": "/w"}


def translated(*overrides: Mapping[str, Any], legacy: bool = False) -> Mapping[str, Any]:
    run: dict[str, Any] = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}}
    for one in overrides:
        run = {**run, **{key: {**run.get(key, {}), **value} for key, value in one.items()}}
    return bridge.translate(run, **ADDRESSES, legacy=legacy).overrides


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section and those below it; the algorithm's stay whole, for they depend on its name."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        elif name != "algorithm":
            yield f"{prefix}{name}"


@pytest.mark.parametrize("key", [*keys_of(RunConfig)])
def test_every_key_of_a_run_is_mapped_left_out_or_refused(key: str) -> None:
    assert bridge.is_known(key)


def test_a_key_that_no_run_has_is_refused_by_name() -> None:
    for wrong in (
        {"trainer": {"max_step": 3}},
        {"trianer": {"max_steps": 3}},
        {"rollout": {"sampling": {"min_p": 0.1}}},
    ):
        with pytest.raises(SettingsError, match=next(iter(bridge._flat(wrong)))[0]):
            translated(wrong)


def test_defaults_are_those_of_a_run() -> None:
    run = RunConfig.model_validate({"model": {"path": "m"}, "data": {"env": "frozen_lake"}}).model_dump(mode="json")
    own = dict(bridge._flat(run))
    assert {key: own[key] for key in VOLLEY_DEFAULTS} == VOLLEY_DEFAULTS


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"algorithm": {"name": "ppo", "whiten_advantages": False}}, "whiten_advantages"),
        ({"algorithm": {"name": "on_policy_distillation"}}, "on_policy_distillation"),
        ({"algorithm": {"credit": "turn"}}, "credit"),
        ({"algorithm": {"mask_truncated": True}}, "mask_truncated"),
        ({"algorithm": {"epsilon": None}}, "epsilon"),
        ({"trainer": {"optimizer_config": {"schedule_type": "linear"}}}, "schedule_type=linear"),
        ({"trainer": {"on_nonfinite": "skip"}}, "on_nonfinite"),
        ({"data": {"env": "mine.py"}}, "data.env"),
        ({"model": {"path": "runs/a@latest"}}, "model.path"),
        ({"sft": {"max_steps": 3}}, "sft.max_steps"),
        ({"orchestrator": {"generation": {"filters": {"min_reward": 0.1}}}}, "filters.min_reward"),
    ],
)
def test_what_verl_has_no_counterpart_of_is_refused_by_name(given: Mapping[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        translated(given)


def test_algorithms_are_mapped() -> None:
    found = {
        name: translated({"algorithm": {"name": name}})
        for name in ("grpo", "drgrpo", "rloo", "dapo", "gspo-token", "cispo", "reinforce_plus_plus", "ppo")
    }
    of = {name: made["algorithm.adv_estimator"] for name, made in found.items()}
    assert of | {"ppo": "gae"} == of
    assert [name for name, made in found.items() if not made["algorithm.norm_adv_by_std_in_grpo"]] == ["drgrpo"]

    assert found["gspo-token"][f"{ACTOR}.policy_loss.loss_mode"] == "gspo"
    assert found["gspo-token"][f"{ACTOR}.clip_ratio_high"] == 4e-4
    assert found["drgrpo"][f"{ACTOR}.loss_scale_factor"] == 512
    kl = translated({"algorithm": {"beta": 0.1, "kl_in": "reward"}})
    assert kl["algorithm.kl_ctrl.kl_coef"] == 0.1


@pytest.mark.parametrize(
    "name", ["grpo", "drgrpo", "rloo", "dapo", "gspo-token", "cispo", "reinforce_plus_plus", "ppo"]
)
def test_defaults_that_are_given_are_those_that_are_not(name: str) -> None:
    base = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}, "algorithm": {"name": name}}
    whole = run_model().model_validate(base).algorithm.model_dump(mode="json")
    made, short = translated({"algorithm": whole}), translated({"algorithm": {"name": name}})
    assert {key: value for key, value in made.items() if key in short} == short


def test_an_estimator_without_counterpart_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="maxrl"):
        translated({"algorithm": {"name": "dapo", "advantage_estimator": "maxrl"}})


def test_the_ratio_is_to_the_sampler_unless_it_is_corrected() -> None:
    where = "algorithm.rollout_correction"
    assert translated()[f"{where}.bypass_mode"] is True
    corrected = translated({"algorithm": {"sampler_is": "token", "sampler_is_threshold": 3.0}})
    assert corrected[f"{where}.bypass_mode"] is False
    assert (corrected[f"{where}.rollout_is"], corrected[f"{where}.rollout_is_threshold"]) == ("token", 3.0)


def test_staleness_counts_from_one_in_verl() -> None:
    made = translated({"grpo_config": {"off_policy_steps": 0}})
    assert made["trainer.v1.sampler.max_off_policy_threshold"] == 1
    with pytest.raises(SettingsError, match="off_policy_steps=1"):
        translated(legacy=True)


def test_an_address_that_is_missing_is_asked_for() -> None:
    run = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}}
    with pytest.raises(SettingsError, match="--server"):
        bridge.translate(run, env_url="http://e", weights_dir="/w")
