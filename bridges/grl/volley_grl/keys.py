"""Keys of GRL's configuration files, and the rule for each: copied to keys of Volley, without effect, or refused.

GRL is lmgame-org/GRL at 91a0856 (2025-09-29): `configs/tunix_base.yaml` and `configs/agents.yaml`. The sections `ppo`,
`training`, `rollout_runtime`, `mesh`, `grpo` and `lora` of its plan for Tunix are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAMPLING = "cluster.rollout_config.train"
_TRAINING = "cluster.training_config"
_OPTIMIZERS = ("trainer.optimizer_config", "algorithm.critic_optimizer_config")

OLDER_KEYS: Mapping[str, str] = {
    **{f"rollout.{key}": f"{_SAMPLING}.{key}" for key in ("max_prompt_length", "temperature", "top_p", "top_k")},
    "rollout.kv_cache_size": f"{_SAMPLING}.kv_cache_size",
    "rollout.max_tokens_to_generate": f"{_SAMPLING}.total_generation_steps",
    "rollout.total_generation_steps": f"{_SAMPLING}.total_generation_steps",
    "rollout_runtime.max_tokens_to_generate": f"{_SAMPLING}.total_generation_steps",
    "training.optimizer.learning_rate": "trainer.optim.actor_lr",
    "training.gradient_accumulation_steps": "trainer.optim.gradient_accumulation_steps",
    **{f"training.{key}": f"trainer.optim.{key}" for key in ("actor_lr", "critic_lr", "b1", "b2", "weight_decay")},
    "training.max_grad_norm": "trainer.optim.max_grad_norm",
    "training.learning_rate": "trainer.optim.actor_lr",
    "training.optimizer.type": "trainer.optim.optimizer",
    "mesh.dims": "cluster.mesh.dims",
    "ppo.mini_batch_size": f"{_TRAINING}.mini_batch_size",
}
"""Keys of the older layouts, and those of the present one."""
OLDER_SECTIONS: Mapping[str, str] = {
    "ppo.": "trainer.ppo.",
    "rollout_runtime.": f"{_SAMPLING}.",
    "training.optimizer.": "trainer.optim.",
    "training.": f"{_TRAINING}.",
    "mesh.": "cluster.mesh.",
}

COPIED: Mapping[str, tuple[str, ...]] = {
    "rollout.rollout_filter_type": ("orchestrator.generation.filters.rollout_filter_type",),
    "rollout.reward_normalization.grouping": ("algorithm.reward_normalization.grouping",),
    "rollout.reward_normalization.method": ("algorithm.reward_normalization.method",),
    "cluster.mesh.shape": ("trainer.mesh.shape",),
    "cluster.mesh.axes": ("trainer.mesh.axis_names",),
    "cluster.offload_to_cpu": ("trainer.offload_reference",),
    f"{_TRAINING}.training_micro_batch_size": ("trainer.train_micro_batch_size",),
    f"{_TRAINING}.checkpoint.save_interval_steps": ("trainer.checkpointing_options.save_interval_steps",),
    f"{_SAMPLING}.temperature": ("rollout.sampling.temperature",),
    f"{_SAMPLING}.top_p": ("rollout.sampling.top_p",),
    "trainer.ppo.num_ppo_epochs": ("grpo_config.num_iterations",),
    "trainer.ppo.gamma": ("algorithm.gamma",),
    "trainer.ppo.gae_lambda": ("algorithm.gae_lambda",),
    "trainer.ppo.beta": ("algorithm.beta",),
    "trainer.ppo.kl_method": ("algorithm.kl_loss_mode",),
    "trainer.ppo.clip_range_value": ("algorithm.clip_range_value",),
    "trainer.ppo.entropy_coef": ("algorithm.entropy_coef",),
    "trainer.ppo.epsilon_high": ("algorithm.epsilon_high",),
    "trainer.ppo.epsilon_c": ("algorithm.epsilon_c",),
    "trainer.optim.actor_lr": ("trainer.optimizer_config.learning_rate",),
    "trainer.optim.critic_lr": ("algorithm.critic_optimizer_config.learning_rate",),
    **{f"trainer.optim.{key}": tuple(f"{one}.{key}" for one in _OPTIMIZERS) for key in ("b1", "b2", "weight_decay")},
    "trainer.optim.max_grad_norm": tuple(f"{one}.max_grad_norm" for one in _OPTIMIZERS),
    "trainer.optim.warmup_steps": tuple(f"{one}.warmup_steps" for one in _OPTIMIZERS),
    "grpo.num_iterations": ("grpo_config.num_iterations",),
    "grpo.beta": ("algorithm.beta",),
    "grpo.epsilon": ("algorithm.epsilon",),
    "lora.rank": ("trainer.lora.rank",),
    "lora.alpha": ("trainer.lora.alpha",),
    "model.repo_id": ("model.path",),
}
"""Keys with the same meaning here. Others, like lengths and numbers of groups, are translated together."""

_NO_THREADS = "episodes run concurrently without threads of their own, up to orchestrator.max_concurrent_episodes"
_NO_DATASET = "tasks come from the environments, so there is no dataset to load"
_LOGS = "metrics are in the run's folder; services.trainer.sinks sends them elsewhere"
_BATCHES = "the trainer chooses its other batch sizes itself"
_STEPS = "the number of steps is max_steps"
NEUTRAL: Mapping[str, str] = {
    "rollout.num_prompt_threads": _NO_THREADS,
    "rollout.num_env_threads": _NO_THREADS,
    "rollout.num_init_threads": _NO_THREADS,
    "rollout.show_tqdm": "volley train shows progress by itself",
    "rollout.validation_seed": "held-out tasks are fixed, and disjoint from all training tasks",
    f"{_TRAINING}.rollout_micro_batch_size": _BATCHES,
    f"{_TRAINING}.compute_logps_micro_batch_size": _BATCHES,
    f"{_SAMPLING}.kv_cache_size": "the engine sizes its pool, or rollout.engine.max_total_tokens does",
    "trainer.ppo.max_completion_length": "sequences are never cut; trainer.length_buckets are the compiled lengths",
    "trainer.ppo.vf_coef": "actor and critic are separate models with optimizers of their own",
    f"{_TRAINING}.num_batches": _STEPS,
    f"{_TRAINING}.num_test_batches": _STEPS,
    f"{_TRAINING}.num_epochs": _STEPS,
    f"{_TRAINING}.metrics_logging_options.log_dir": _LOGS,
    f"{_TRAINING}.metrics_logging_options.flush_every_n_steps": _LOGS,
    f"{_TRAINING}.checkpoint.intermediate_ckpt_dir": "checkpoints are in the run's folder",
    f"{_TRAINING}.checkpoint.ckpt_dir": "checkpoints are in the run's folder",
    **dict.fromkeys(
        ("data.train_data_dir", "data.test_data_dir", "data.train_fraction", "data.batch_size"), _NO_DATASET
    ),
}
"""Keys that have no effect here, and the reason."""

_MESH = "trainer.mesh is one mesh for actor, critic and reference; rollout servers have rollout.engine.tp_size"
FIXED: tuple[tuple[str, Any, str, str], ...] = (
    ("cluster.role_to_mesh", "same", "roles have no meshes of their own", f"give same: {_MESH}"),
    ("trainer.optim.optimizer", "adamw", "the optimizer is AdamW", "give adamw"),
    (
        "cluster.rollout_engine",
        "vanilla",
        "Volley samples with sglang-jax",
        "give vanilla, or set volley.rollout.engine.kind to vllm or sglang and its url",
    ),
    (
        "trainer.optim.type",
        "constant",
        "GRL knows one schedule",
        "give constant, or set volley.trainer.optimizer_config.schedule_type",
    ),
)
"""Keys of which one value has a counterpart: name, value, reason, hint."""

VERL_SECTIONS = ("actor_rollout_ref", "critic", "algorithm", "system")
"""Sections of GRL's configuration for verl."""
