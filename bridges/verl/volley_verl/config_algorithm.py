"""The algorithm of a Volley run in verl's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from volley_verl.config_keys import ACTOR, CRITIC, Overrides, optimizer
from volley_verl.settings import SettingsError

_ESTIMATORS = {
    "grpo": "grpo",
    "drgrpo": "grpo",
    "rloo": "rloo",
    "dapo": "grpo",
    "gspo-token": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "ppo": "gae",
}
_LOSSES = {"gspo-token": "gspo", "cispo": "cispo"}
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "sequence-mean-token-scale": "seq-mean-token-sum-norm",
}
_KL = {"kl": "kl", "mse_kl": "mse", "low_var_kl": "low_var_kl"}
_ALGORITHM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "drgrpo": {"loss_agg_mode": "sequence-mean-token-scale"},
    "dapo": {"epsilon_high": 0.28},
    "gspo-token": {"epsilon": 3e-4, "epsilon_high": 4e-4, "loss_agg_mode": "sequence-mean-token-mean"},
    "cispo": {"epsilon": 1.0, "epsilon_high": 4.0},
}


def add_algorithm(overrides: Overrides, given: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    name = given.get("name", "grpo")
    if name not in _ESTIMATORS:
        raise SettingsError(f"algorithm.name={name} has no counterpart in verl; known: {sorted(_ESTIMATORS)}")
    section = {**_ALGORITHM_DEFAULTS.get(name, {}), **given}
    wanted = section.pop("advantage_estimator", name)
    if wanted not in _ESTIMATORS:
        raise SettingsError(f"algorithm.advantage_estimator={wanted} has no counterpart in verl")
    estimator = _ESTIMATORS[wanted]
    if section.pop("baseline", "none") == "group":
        estimator += "_baseline"
    overrides["algorithm.adv_estimator"] = estimator
    overrides["algorithm.norm_adv_by_std_in_grpo"] = wanted != "drgrpo"
    overrides[f"{ACTOR}.policy_loss.loss_mode"] = _LOSSES.get(name, "vanilla")
    epsilon = section.pop("epsilon", 0.2)
    if epsilon is None:
        raise SettingsError("algorithm.epsilon=null has no counterpart in verl: its loss always clips")
    high = section.pop("epsilon_high", None)
    overrides[f"{ACTOR}.clip_ratio"] = overrides[f"{ACTOR}.clip_ratio_low"] = epsilon
    overrides[f"{ACTOR}.clip_ratio_high"] = epsilon if high is None else high
    overrides[f"{ACTOR}.clip_ratio_c"] = section.pop("epsilon_c", None) or 1e9  # verl's loss always has a dual clip
    mode = section.pop("loss_agg_mode", "token-mean")
    overrides[f"{ACTOR}.loss_agg_mode"] = _AGGREGATIONS[mode]
    if mode == "sequence-mean-token-scale":
        overrides[f"{ACTOR}.loss_scale_factor"] = data.get("max_response_length", 512)
    _kl(overrides, section)
    _correction(overrides, section)
    overrides[f"{ACTOR}.entropy_coeff"] = section.pop("entropy_coef", 0.0)
    _critic(overrides, name, section)
    section.pop("name", None)
    if section.get("reward_normalization", {}).get("method") == "identity":
        del section["reward_normalization"]
    for key, value in section.items():
        if value != _ALGORITHM_OFF.get(key, _ABSENT):
            raise SettingsError(f"algorithm.{key}={value} has no counterpart in verl")


_ABSENT = object()
_ALGORITHM_OFF: Mapping[str, Any] = {
    "credit": "episode",
    "mask_truncated": False,
    "teacher_kl_coef": 0.0,
    "overlong_length": None,
    "overlong_buffer": None,
    "overlong_penalty": 1.0,
    "whiten_advantages": True,
    "gae_lambda_alpha": None,
    "critic_gae_lambda": None,
    "critic_updates": 1,
    "critic_frozen": "none",
}
"""Keys without a counterpart, and the value with which they have no effect."""


def _kl(overrides: Overrides, section: dict[str, Any]) -> None:
    beta, where = section.pop("beta", 0.0), section.pop("kl_in", "loss")
    kind = section.pop("kl_loss_mode", "low_var_kl")
    if not beta:
        return
    if where == "reward":
        overrides.update({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": beta})
        return
    overrides.update({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": beta, f"{ACTOR}.kl_loss_type": _KL[kind]})


def _correction(overrides: Overrides, section: dict[str, Any]) -> None:
    where = "algorithm.rollout_correction"
    weigh, threshold = section.pop("sampler_is", "none"), section.pop("sampler_is_threshold", 2.0)
    # Without a correction, Volley's ratio is to the sampler. verl's is so in this mode, which knows the clipped loss.
    if overrides[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla":
        overrides[f"{where}.bypass_mode"] = weigh == "none"
    if weigh != "none":
        overrides.update({f"{where}.rollout_is": weigh, f"{where}.rollout_is_threshold": threshold})
    reject, bounds = section.pop("sampler_rs", "none"), section.pop("sampler_rs_bounds", [0.5, 2.0])
    if reject != "none":
        raise SettingsError(
            f"algorithm.sampler_rs={reject} with bounds {list(bounds)}: verl's rollout_rs bounds other quantities (k1 "
            "to k3 of the ratio); set algorithm.rollout_correction.rollout_rs and its threshold yourself"
        )


def _critic(overrides: Overrides, name: str, section: dict[str, Any]) -> None:
    if "gamma" in section:
        overrides["algorithm.gamma"] = section.pop("gamma")
    if name != "ppo":
        return
    overrides["algorithm.lam"] = section.pop("gae_lambda", 0.95)
    clip = section.pop("clip_range_value", 0.2)
    overrides[f"{CRITIC}.cliprange_value"] = 1e9 if clip is None else clip
    overrides["trainer.critic_warmup"] = section.pop("critic_warmup_steps", 0)
    given = section.pop("critic_optimizer_config", {})
    makers = optimizer(f"{CRITIC}.optim", f"{CRITIC}.grad_clip")
    for key, value in given.items():
        if key in ("b1", "b2"):
            continue
        if key not in makers:
            raise SettingsError(f"algorithm.critic_optimizer_config.{key} is unknown")
        overrides.update(makers[key](value))
    overrides[f"{CRITIC}.optim.betas"] = [given.get("b1", 0.9), given.get("b2", 0.95)]
