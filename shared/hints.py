"""Hints for keys and overrides that are written as verl or Hydra write them."""

from __future__ import annotations

from collections.abc import Mapping

_VERL_DOCS = "docs/migration.md#from-verl names the keys of Volley"
_VERL_ONLY = frozenset({"actor_rollout_ref", "critic", "system", "reward", "reward_model", "custom_reward_function"})
"""Sections of verl that Volley does not have."""
VERL_KEYS: Mapping[str, str] = {
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
    "algorithm.lam": "algorithm.gae_lambda",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "trainer.groups_per_step",
    "data.max_response_length": "grpo_config.max_response_length",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.test_freq": "orchestrator.eval_every_n_steps",
    "trainer.save_freq": "trainer.checkpointing_options.save_interval_steps",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
}
"""Keys of verl that its users override most, and those with the same meaning here."""


def hint_for(key: str) -> tuple[str, str] | None:
    """Return whose key this is, and what to write instead; None for any other key."""
    if key[:1] in ("+", "~"):
        plain = key.lstrip("+~")
        return (
            f"{key[: -len(plain) or None]} before a key is Hydra's",
            f"write {VERL_KEYS.get(plain, plain)}=…; a key cannot be added or removed",
        )
    if key in VERL_KEYS:
        return f"{key} is a key of verl", f"write {VERL_KEYS[key]}=…"
    section = key.partition(".")[0]
    return (f"{section} is a section of verl", _VERL_DOCS) if section in _VERL_ONLY else None
