"""Names that other trainers give to settings and arguments, and what to write instead.

A name is a key, or `key: value` for one value of it. What to write is a setting of Volley, an option of `volley train`,
or a sentence; a remark may follow after `; `. Without a remark, or with one that starts with `for `, the value stays
the same. docs/migration.md explains the same names, and a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.hints import advice

_VERL_DOCS = "docs/migration.md#from-verl names the keys of Volley"
_VERL_ONLY = frozenset({"actor_rollout_ref", "critic", "system", "reward", "reward_model", "custom_reward_function"})
"""Sections of verl that Volley does not have."""
_BATCH = "trainer.groups_per_step; it counts prompts, each with grpo_config.num_generations answers"
_ONE_STEP = "leave it out: each generated batch is one step"
TRL: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "train_dataset": "--data",
    "dataset_name": "--data",
    "eval_dataset": "--eval-data",
    "reward_funcs": "--reward",
    "reward_weights": "data.rewards; weights of your own functions: --reward FILE.py:NAME=WEIGHT",
    "environment_factory": "--env",
    "peft_config": "trainer.lora",
    "args": "write each setting by its name, such as trainer.max_steps",
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "steps_per_generation": _ONE_STEP,
    "generation_batch_size": _ONE_STEP,
    "max_completion_length": "grpo_config.max_response_length",
    "max_prompt_length": "rollout.engine.context_length; it bounds prompt and answer together",
    "num_train_epochs": "trainer.max_steps; an epoch is tasks divided by trainer.groups_per_step; for SFT sft.epochs",
    "lr_scheduler_type": "trainer.optimizer_config.schedule_type",
    "loss_type": "algorithm.name; docs/algorithms.md lists them",
    "loss_type: grpo": "algorithm.name=grpo; with algorithm.loss_agg_mode=sequence-mean-token-mean",
    "loss_type: dapo": "algorithm.name=grpo; DAPO's clipping and overlong penalty are algorithm.name=dapo",
    "loss_type: dr_grpo": "algorithm.name=drgrpo",
    "loss_type: cispo": "algorithm.name=cispo",
    "loss_type: sapo": "algorithm.name=sapo",
    "loss_type: luspo": "algorithm.loss=examples/rules/luspo.py:loss",
    "loss_type: vespo": "algorithm.loss=examples/rules/vespo.py:loss",
    "loss_type: bnpo": "choose another: Volley has no bnpo",
    "importance_sampling_level": "algorithm.name; gspo-token is the level `sequence`",
    "importance_sampling_level: sequence": "algorithm.name=gspo-token",
    "scale_rewards": "algorithm.name; grpo divides by a group's standard deviation, drgrpo does not",
    "scale_rewards: group": "algorithm.name=grpo",
    "scale_rewards: none": "algorithm.name=drgrpo",
    "delta": "algorithm.epsilon_c",
    "beta": "algorithm.beta; for DPO dpo.beta",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "vllm_importance_sampling_correction": "algorithm.sampler_is=token",
    "vllm_importance_sampling_mode": "algorithm.sampler_is; or algorithm.sampler_rs, which masks instead",
    "vllm_importance_sampling_clip_max": "algorithm.sampler_is_threshold",
    "use_vllm": "rollout.engine.kind; docs/engines.md explains it",
    "vllm_server_base_url": "rollout.engine.url",
    "bf16": "model.dtype=bfloat16",
    "gradient_checkpointing": "model.remat; docs/memory.md explains it",
    "report_to": "run.trackers; a list, such as [wandb]",
    "logging_steps": "leave it out: every step is recorded",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "eval_steps": "orchestrator.eval_every_n_steps",
    "save_steps": "trainer.checkpointing_options.save_interval_steps",
    "save_total_limit": "trainer.checkpointing_options.max_to_keep",
    "resume_from_checkpoint": "leave it out: `volley up runs/NAME` continues a run",
    "sync_ref_model": "leave it out: the reference is the initial model",
    "use_adaptive_entropy": "leave it out: the entropy coefficient is constant",
    "top_entropy_quantile": "leave it out: every token is trained",
    "algorithm.name: gspo": "algorithm.name=gspo-token",
}
VERL: Mapping[str, str] = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "trainer.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "trainer.lora.alpha",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer_config.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.optimizer_config.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.optimizer_config.warmup_steps",
    "actor_rollout_ref.actor.grad_clip": "trainer.optimizer_config.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "grpo_config.num_iterations",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.groups_per_step",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.epsilon",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.epsilon_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.epsilon_c",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.beta; 0 means none",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.beta",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_loss_mode",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_agg_mode",
    "actor_rollout_ref.rollout.n": "grpo_config.num_generations",
    "actor_rollout_ref.rollout.name": "rollout.engine.kind",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.sampling.top_k",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.engine.tp_size",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "orchestrator.max_turns",
    "critic.optim.lr": "algorithm.critic_optimizer_config.learning_rate",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.adv_estimator: gae": "algorithm.name=ppo",
    "algorithm.adv_estimator: grpo_passk": "algorithm.advantage=examples/rules/pass_at_k.py:advantage",
    "algorithm.adv_estimator: reinforce_plus_plus_baseline": "algorithm.baseline=group; with reinforce_plus_plus",
    "algorithm.use_kl_in_reward": "algorithm.beta; with algorithm.kl_in=reward",
    "algorithm.kl_ctrl.kl_coef": "algorithm.beta; with algorithm.kl_in=reward",
    "algorithm.rollout_correction": "algorithm.sampler_is; or algorithm.sampler_rs",
    "algorithm.lam": "algorithm.gae_lambda",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "trainer.groups_per_step",
    "data.max_prompt_length": "rollout.engine.context_length; it bounds prompt and answer together",
    "data.max_response_length": "grpo_config.max_response_length",
    "custom_reward_function.path": "--reward",
    "reward.custom_reward_function.path": "--reward",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.total_epochs": "trainer.max_steps; an epoch is tasks divided by trainer.groups_per_step",
    "trainer.test_freq": "orchestrator.eval_every_n_steps",
    "trainer.save_freq": "trainer.checkpointing_options.save_interval_steps",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.logger": "run.trackers; a list, such as [wandb]",
    "trainer.v1.sampler.max_off_policy_threshold": "grpo_config.off_policy_steps; 1 less than verl's",
}
TUNIX: Mapping[str, str] = {
    "loss_algo": "algorithm.name",
    "loss_algo: gspo-token": "algorithm.name=gspo-token",
    "degenerate_group_masking": "trainer.filters.zero_variance",
    "max_concurrency": "orchestrator.max_concurrent_episodes",
    "episode_timeout": "orchestrator.episode_timeout_s",
    "overlong_filter": "algorithm.mask_truncated",
    "mini_batch_size": "trainer.groups_per_step",
    "max_tokens_to_generate": "grpo_config.max_response_length",
    "rollout_sglang_jax_precompile_bs_paddings": "rollout.engine.precompile_bs_paddings",
    "rollout_sglang_jax_precompile_token_paddings": "rollout.engine.precompile_token_paddings",
    "rollout_engine": "rollout.engine.kind",
    "role_to_mesh": "trainer.mesh.shape",
    "offload_to_cpu": "trainer.offload_reference",
    "reward_fns": "--reward",
}
_SHORT: Mapping[str, str] = {
    "lr": VERL["actor_rollout_ref.actor.optim.lr"],
    "epochs": TRL["num_train_epochs"],
    "steps": "trainer.max_steps",
    "batch_size": _BATCH,
    "weight": "give a reward its weight with --reward FILE.py:NAME=WEIGHT",
}
"""Short names that people try for settings of RL."""
_TABLES = {"TRL": TRL, "verl": VERL, "Tunix": TUNIX}


def renamed(name: str, value: object = "") -> tuple[str, str] | None:
    """Return whose name this is and the text of its table; None for any other name."""
    for trainer, table in _TABLES.items():
        if text := table.get(f"{name}: {value}") or table.get(name):
            return trainer, text
    return None


def meant_by(name: str, value: object) -> str | None:
    """Return what to write for a short name of a setting; None for any other name."""
    return advice(_SHORT[name], value) if name in _SHORT else None


def hint_for(key: str, value: object = "") -> tuple[str, str] | None:
    """Return whose key this is, and what to write instead; None for any other key."""
    if key[:1] in ("+", "~"):
        plain = key.lstrip("+~")
        instead = VERL.get(plain, plain).partition(";")[0]
        return f"{key[: -len(plain) or None]} before a key is Hydra's", (
            f"write {instead}=…; a key cannot be added or removed"
        )
    if key != "algorithm.name" and (found := renamed(key, value)):
        return f"it is a key of {found[0]}", advice(found[1], value)
    section = key.partition(".")[0]
    return (f"{section} is a section of verl", _VERL_DOCS) if section in _VERL_ONLY else None
