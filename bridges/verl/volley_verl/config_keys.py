"""Keys of a Volley run: the overrides that they become, those that are left out, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from volley_verl.settings import SettingsError

Overrides = dict[str, Any]
ROLLOUT, ACTOR, CRITIC = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "critic"
OWN = f"{ROLLOUT}.custom.volley"
ENGINE = f"{ROLLOUT}.checkpoint_engine"

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_COMPUTED_IN = tuple(
    f"{section}.mixed_precision.param_dtype"
    for section in (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", f"{CRITIC}.fsdp")
)
_FILE = "the environment service lists an environment of a file under another name: give that (`volley env list`)"


def _splits(name: str) -> Overrides:
    if not isinstance(name, str) or name.endswith(".py") or "/" in name or ":" in name:
        raise SettingsError(f"data.env={name}: {_FILE}")
    return {"data.train_files": [f"{name}/train"], "data.val_files": [f"{name}/eval"]}


def _model(path: str) -> Overrides:
    if "@" in path:
        raise SettingsError(f"model.path={path}: export the run's version (`volley export`) and name the folder")
    return {
        "actor_rollout_ref.model.path": path,
        f"{CRITIC}.model.path": path,
        f"{ENGINE}.engine_kwargs.volley.model": path,
    }


def _same(*keys: str) -> Callable[[Any], Overrides]:
    return lambda value: dict.fromkeys(keys, value)


def optimizer(where: str, grad_clip: str) -> Mapping[str, Callable[[Any], Overrides]]:
    return {
        "learning_rate": _same(f"{where}.lr"),
        "warmup_steps": _same(f"{where}.lr_warmup_steps"),
        "schedule_type": lambda name: {f"{where}.lr_scheduler_type": _schedule(name)},
        "weight_decay": _same(f"{where}.weight_decay"),
        "max_grad_norm": _same(grad_clip, f"{where}.clip_grad"),
    }


def _schedule(name: str) -> str:
    if name not in ("constant", "cosine"):
        raise SettingsError(f"schedule_type={name} has no counterpart in verl, which knows constant and cosine")
    return name


def micro_batch(n_rows: int | None) -> Overrides:
    keys = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
    more = ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", f"{CRITIC}.ppo_micro_batch_size_per_gpu")
    return {} if n_rows is None else dict.fromkeys((*keys, *more), n_rows)


def _packed(n_tokens: int | None) -> Overrides:
    if n_tokens is None:
        return {}
    sizes = (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{CRITIC}.ppo_max_token_len_per_gpu")
    return {f"{ACTOR}.use_dynamic_bsz": True, **dict.fromkeys(sizes, n_tokens)}


def _filter(on: bool) -> Overrides:
    return {"algorithm.filter_groups.enable": on, "algorithm.filter_groups.metric": "reward"}


def _threshold(steps: int) -> Overrides:
    """verl counts the step itself: its threshold is 1 where Volley's staleness is 0."""
    return {
        "trainer.v1.sampler.max_off_policy_threshold": steps + 1,
        "trainer.v1.separate_async.num_warmup_batches": steps,
    }


VOLLEY_DEFAULTS: Mapping[str, Any] = {
    "run.name": "quickstart",
    "run.seed": 0,
    "model.dtype": "float32",
    "model.remat": "none",
    "data.n_eval_tasks": 200,
    "grpo_config.num_generations": 8,
    "grpo_config.num_iterations": 1,
    "grpo_config.off_policy_steps": 1,
    "grpo_config.max_response_length": 512,
    "trainer.max_steps": 10,
    "trainer.groups_per_step": 8,
    "trainer.checkpointing_options.save_interval_steps": 1,
    "trainer.checkpointing_options.max_to_keep": 3,
    "trainer.optimizer_config.learning_rate": 1e-5,
    "trainer.optimizer_config.schedule_type": "constant",
    "trainer.optimizer_config.warmup_steps": 0,
    "trainer.optimizer_config.weight_decay": 0.0,
    "trainer.optimizer_config.max_grad_norm": 1.0,
    "rollout.sampling.temperature": 1.0,
    "rollout.sampling.top_p": 1.0,
    "rollout.sampling.top_k": -1,
    "rollout.update_mode": "retract",
    "orchestrator.max_turns": 8,
}
"""Volley's defaults of keys that verl has another default for."""

MAPPED: dict[str, Callable[[Any], Overrides]] = {
    "run.name": _same("trainer.experiment_name"),
    "run.trackers": lambda names: {"trainer.logger": ["console", *names]},
    "run.seed": _same("data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed"),
    "model.path": _model,
    "model.dtype": lambda dtype: dict.fromkeys(_COMPUTED_IN, _DTYPES[dtype]),
    "model.remat": lambda how: {"actor_rollout_ref.model.enable_gradient_checkpointing": how != "none"},
    "data.env": _splits,
    "data.n_eval_tasks": _same("data.val_max_samples"),
    "grpo_config.num_generations": _same(f"{ROLLOUT}.n"),
    "grpo_config.num_iterations": _same(f"{ACTOR}.ppo_epochs"),
    "grpo_config.off_policy_steps": _threshold,
    "grpo_config.max_response_length": _same(f"{OWN}.max_response_length"),
    "trainer.max_steps": _same("trainer.total_training_steps"),
    "trainer.groups_per_step": _same("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    "trainer.train_micro_batch_size": micro_batch,
    "trainer.micro_batch_tokens": _packed,
    "trainer.filters.zero_variance": _filter,
    "trainer.checkpointing_options.save_interval_steps": _same("trainer.save_freq"),
    "trainer.checkpointing_options.max_to_keep": _same(
        "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
    ),
    "trainer.lora.rank": _same("actor_rollout_ref.model.lora_rank"),
    "trainer.lora.alpha": _same("actor_rollout_ref.model.lora_alpha"),
    "trainer.lora.target_modules": _same("actor_rollout_ref.model.target_modules"),
    "rollout.sampling.temperature": _same(f"{ROLLOUT}.temperature"),
    "rollout.sampling.top_p": _same(f"{ROLLOUT}.top_p"),
    "rollout.sampling.top_k": _same(f"{ROLLOUT}.top_k"),
    "rollout.update_mode": _same(f"{OWN}.update_mode", f"{ENGINE}.engine_kwargs.volley.mode"),
    "orchestrator.max_turns": _same(f"{ROLLOUT}.multi_turn.max_assistant_turns"),
    "orchestrator.eval_every_n_steps": lambda n: {} if n is None else {"trainer.test_freq": n},
    **{
        f"trainer.optimizer_config.{key}": make
        for key, make in optimizer(f"{ACTOR}.optim", f"{ACTOR}.grad_clip").items()
    },
}
TAKEN = (
    "trainer.optimizer_config.b1",
    "trainer.optimizer_config.b2",
    "rollout.engine.context_length",
    "rollout.weights_root",
    "services.env.url",
    "services.rollout_urls",
)
"""Keys that are read together with others."""
DEFAULTS: dict[str, tuple[Any, str]] = {
    "mode": ("rl", "only RL has one"),
    "model.initial_weights": ("folder", "verl starts from the folder's weights"),
    "trainer.order": ("arrival", "verl trains groups in the order in which they end"),
    "trainer.on_nonfinite": ("stop", "verl goes on after a step that is not finite"),
    "trainer.filters.logprob": (None, "verl reports the difference to the engine, and filters no group by it"),
    "trainer.filters.custom": (None, "verl calls no function that drops groups: set trainer.filters.zero_variance"),
    "trainer.filters.max_num_gen_batches": (10, "verl's present trainer ignores it"),
    "trainer.spot_checks": (0.0, "verl compares all servers together: algorithm.rollout_correction"),
    "trainer.lora": (None, "name rank, alpha and target_modules"),
    "trainer.mesh.shape": ([1, 1], "choose verl's own parallelism: trainer.n_gpus_per_node, fsdp_config"),
    "orchestrator.generation.truncation": ("none", "the agent loop ends an episode that fills the context"),
    "orchestrator.generation.mode": ("asynchronous", "set trainer.v1.trainer_mode"),
    "orchestrator.generation.over_sampling_factor": (None, "raise trainer.v1.separate_async.num_warmup_batches"),
    "orchestrator.generation.straggler": (None, "verl waits for all episodes"),
}
_WARM_START = "train it with Volley, and name its export as model.path"
REFUSED = {
    "sft": _WARM_START,
    "dpo": _WARM_START,
    "orchestrator.generation.filters": "set algorithm.filter_groups, or write a sampler for verl",
    "data.mixture": "name several splits in data.train_files; verl weighs none",
    "data.curriculum": "write a sampler for verl",
}
"""Sections that decide how the run learns, and what to do instead."""
LEFT_OUT = (
    "run.dir",
    "run.date",
    "run.bucket",
    "run.dashboard",
    "run.traces",
    "model.content",
    "model.routing_replay",
    "data.env_config",
    "data.train",
    "data.eval",
    "data.rewards",
    "data.sources",
    "trainer.backend",
    "trainer.length_buckets",
    "trainer.offload_reference",
    "trainer.attention",
    "trainer.mesh.axis_names",
    "rollout.engine",
    "orchestrator.max_concurrent_episodes",
    "orchestrator.lease_s",
    "orchestrator.episode_timeout_s",
    "orchestrator.max_attempts",
    "orchestrator.generation.concurrency",
    "orchestrator.generation.partial_rollouts",
    "orchestrator.generation.eval_share",
    "services",
    "tinker",
)
"""Keys of the services, which run with this file, and of Volley's own trainer."""
