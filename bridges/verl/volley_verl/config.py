"""A Volley run's configuration as Hydra overrides for verl.

Each key is one of three: it has a counterpart in verl; it concerns Volley's own processes, and is left out; or it
decides how the run learns and verl has no counterpart, so that it is refused by name unless it has its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from volley_verl.config_algorithm import add_algorithm
from volley_verl.config_keys import (
    ACTOR,
    DEFAULTS,
    ENGINE,
    LEFT_OUT,
    MAPPED,
    OWN,
    REFUSED,
    ROLLOUT,
    TAKEN,
    VOLLEY_DEFAULTS,
    Overrides,
    micro_batch,
)
from volley_verl.settings import AGENT, BACKEND, SettingsError


@dataclass
class Translation:
    """Overrides for verl, by key, and the keys that concern Volley's own processes."""

    overrides: Overrides = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return overrides as Hydra's command line takes them; `+` adds a key that verl's files do not have."""
        return [f"{'+' if _is_new(key) else ''}{key}={_literal(value)}" for key, value in self.overrides.items()]


def translate(
    run: Mapping[str, Any],
    *,
    env_url: str | None = None,
    servers: Sequence[str] = (),
    weights_dir: str | None = None,
    legacy: bool = False,
) -> Translation:
    """Translate a run's configuration, as read from its YAML.

    Args:
        env_url, servers: addresses, instead of those that the run names under `services`.
        weights_dir: folder for new weights that all servers read too; default: `rollout.weights_root`.
        legacy: for verl's legacy trainer, which is synchronous.

    Raises:
        SettingsError: a key is unknown, has no counterpart in verl, or an address is missing.
    """
    made = Translation()
    _base(made.overrides)
    for key, value in {**VOLLEY_DEFAULTS, **dict(_flat(run))}.items():
        _one(made, key, value)
    if legacy:
        _legacy(made.overrides)
    add_algorithm(made.overrides, run.get("algorithm") or {}, run.get("grpo_config") or {})
    _sizes(made.overrides, run)
    _addresses(made.overrides, run, env_url, servers, weights_dir)
    return made


def is_known(key: str) -> bool:
    """True if a dotted key is mapped, left out, or refused with a reason of its own."""
    return key in {*MAPPED, *TAKEN, *DEFAULTS} or key.startswith("algorithm.") or bool(_section(key))


def _one(made: Translation, key: str, value: Any) -> None:
    section = _section(key)
    if key in MAPPED:
        made.overrides.update(MAPPED[key](value))
    elif key in TAKEN or key.startswith("algorithm."):
        return
    elif key in DEFAULTS:
        if value != DEFAULTS[key][0]:
            raise SettingsError(f"{key}={value} has no counterpart in verl: {DEFAULTS[key][1]}")
    elif section in REFUSED:
        raise SettingsError(f"{key}={value} has no counterpart in verl: {REFUSED[section]}")
    elif section:
        made.left_out.append(key)
    else:
        raise SettingsError(f"{key} is no key of a Volley run")


def _section(key: str) -> str:
    """Return the longest name in `REFUSED` or `LEFT_OUT` that covers a key, or nothing."""
    covering = [one for one in (*REFUSED, *LEFT_OUT) if key == one or key.startswith(f"{one}.")]
    return max(covering, key=len, default="")


def _base(overrides: Overrides) -> None:
    """Set what every run with Volley's environments and servers needs."""
    overrides.update(
        {
            "trainer.project_name": "volley",
            "trainer.logger": ["console"],
            "trainer.val_before_train": False,
            "trainer.use_v1": True,
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "actor_rollout_ref.hybrid_engine": False,
            "data.custom_cls.path": "pkg://volley_verl.dataset",
            "data.custom_cls.name": "CustomEnvironmentDataset",
            "data.dataloader_num_workers": 0,
            "reward.reward_manager.name": BACKEND,
            f"{ROLLOUT}.name": BACKEND,
            f"{ROLLOUT}.nnodes": 1,
            f"{ROLLOUT}.tensor_model_parallel_size": 1,
            f"{ROLLOUT}.free_cache_engine": False,
            f"{ROLLOUT}.calculate_log_probs": True,
            f"{ROLLOUT}.multi_turn.enable": True,
            f"{ROLLOUT}.agent.default_agent_loop": AGENT,
            f"{ENGINE}.backend": BACKEND,
            f"{ENGINE}.custom_backend_module": "volley_verl.weights",
        }
    )


def _legacy(overrides: Overrides) -> None:
    if (steps := overrides.pop("trainer.v1.separate_async.num_warmup_batches")) != 0:
        raise SettingsError(f"grpo_config.off_policy_steps={steps}: verl's legacy trainer is synchronous; set it to 0")
    for key in [key for key in overrides if key.startswith("trainer.v1.")]:
        del overrides[key]
    overrides.update(
        {
            "trainer.use_v1": False,
            "actor_rollout_ref.hybrid_engine": True,
            f"{ROLLOUT}.nnodes": 0,
            f"{ENGINE}.backend": "naive",
        }
    )


def _sizes(overrides: Overrides, run: Mapping[str, Any]) -> None:
    """Bound prompt and response by the context together, as Volley does."""
    context = ((run.get("rollout") or {}).get("engine") or {}).get("context_length", 512)
    overrides.update(
        dict.fromkeys(("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.max_model_len"), context)
    )
    optimizer = (run.get("trainer") or {}).get("optimizer_config") or {}
    overrides[f"{ACTOR}.optim.betas"] = [optimizer.get("b1", 0.9), optimizer.get("b2", 0.95)]
    if not overrides.get(f"{ACTOR}.use_dynamic_bsz"):
        overrides.setdefault(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1)
        for key, value in micro_batch(overrides[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]).items():
            overrides.setdefault(key, value)


def _addresses(
    overrides: Overrides, run: Mapping[str, Any], env_url: str | None, servers: Sequence[str], weights_dir: str | None
) -> None:
    services = run.get("services") or {}
    env_url = env_url or (services.get("env") or {}).get("url")
    servers = list(servers or services.get("rollout_urls") or ())
    weights_dir = weights_dir or (run.get("rollout") or {}).get("weights_root")
    if not env_url or not servers or not weights_dir:
        missing = "--env-url" if not env_url else "--server" if not servers else "--weights-dir"
        raise SettingsError(
            f"{missing} is missing: verl starts no Volley service; start the environment service and rollout servers "
            "yourself, the servers with --weights-root at the folder for new weights"
        )
    overrides["data.volley.env_url"] = env_url
    overrides[f"{OWN}.servers"] = servers
    if overrides["trainer.use_v1"]:
        overrides[f"{ROLLOUT}.n_gpus_per_node"] = len(servers)
    overrides[f"{OWN}.weights_dir"] = overrides[f"{ENGINE}.engine_kwargs.volley.weights_dir"] = str(weights_dir)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; free-form sections stay whole."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in ("data.env_config", "data.mixture", "data.curriculum"):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _is_new(key: str) -> bool:
    return ".volley." in key or ".mixed_precision." in key


def _literal(value: Any) -> str:
    """Write a value as Hydra's grammar takes it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return json.dumps(value) if any(c in value for c in " ,=:[]{}()'\"@") else value
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_literal(one) for one in value)}]"
    return json.dumps(value)
