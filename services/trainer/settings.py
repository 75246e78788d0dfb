"""The plain values the service needs, read once from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.trainer.backend import ModelOptions
from services.trainer.batch import Layout
from services.trainer.intake import Rules
from services.trainer.loss import GrpoOptions
from services.trainer.optimizer import OptimizerOptions
from services.trainer.parts import Plan
from services.trainer.policy import PolicyOptions
from services.trainer.sft import SftOptions
from shared.errors import ConfigError
from shared.schema import GrpoConfig, Limits, OptimizerConfig, RunConfig


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the tokenizer and the model's config.json say: ids below `vocab_size`, `pad_id` fills rows."""

    vocab_size: int
    pad_id: int


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Addresses, files and switches of the service itself. `run_folder` is absolute."""

    run: str
    run_folder: Path
    max_to_keep: int
    redis_url: str
    redis_password_file: Path | None
    token_file: Path | None
    env_url: str
    rollout_urls: tuple[str, ...]
    update_mode: str
    limits: Limits
    env: str
    n_demonstrations: int


def from_config(config: RunConfig) -> TrainerSettings:
    """Raises ConfigError if no Redis is named."""
    services = config.services
    if services.redis_url is None:
        raise ConfigError("services.redis_url is not set", "`volley train` starts an embedded server; a service alone needs its address")
    return TrainerSettings(
        run=config.run.name,
        run_folder=config.run.folder.absolute(),
        max_to_keep=config.trainer.checkpointing_options.max_to_keep,
        redis_url=services.redis_url,
        redis_password_file=services.redis_password_file,
        token_file=services.token_file,
        env_url=services.env.base_url,
        rollout_urls=services.rollout_urls,
        update_mode=config.rollout.update_mode,
        limits=services.limits,
        env=config.data.env,
        n_demonstrations=config.sft.n_demonstrations,
    )


def model_options(config: RunConfig, folder: Path) -> ModelOptions:
    mesh = config.trainer.mesh
    return ModelOptions(folder, config.model.dtype, config.model.remat, mesh.shape, mesh.axis_names, config.run.seed)


def layout(config: RunConfig, tokens: Tokens, rows_per_step: int) -> Layout:
    """Raises ConfigError if the rows of a micro-batch do not divide over the mesh."""
    trainer = config.trainer
    rows = min(trainer.train_micro_batch_size or rows_per_step, rows_per_step)
    shards = dict(zip(trainer.mesh.axis_names, trainer.mesh.shape, strict=True)).get("fsdp", 1)
    if rows % shards:
        raise ConfigError(
            f"micro-batches of {rows} sequences do not divide over fsdp={shards}",
            "choose trainer.train_micro_batch_size (or sft.batch_size) as a multiple of it",
        )
    return Layout(tuple(sorted(trainer.length_buckets)), rows, tokens.pad_id)


def policy_options(config: RunConfig, tokens: Tokens) -> PolicyOptions:
    grpo, trainer = config.grpo_config, config.trainer
    rows = trainer.groups_per_step * grpo.num_generations
    return PolicyOptions(
        loss=grpo_options(grpo),
        aggregation=grpo.loss_agg_mode,
        estimator=grpo.advantage_estimator,
        temperature=config.rollout.sampling.temperature,
        n_iterations=grpo.num_iterations,
        max_response_length=grpo.max_response_length,
        rows_per_step=rows,
        layout=layout(config, tokens, rows),
        optimizer=optimizer_options(trainer.optimizer_config, trainer.max_steps * grpo.num_iterations),
        published_dtype=config.model.dtype,
    )


def grpo_options(grpo: GrpoConfig) -> GrpoOptions:
    return GrpoOptions(
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        beta=grpo.beta,
        loss_algo=grpo.loss_algo,
        kl_loss_mode=grpo.kl_loss_mode,
        sampler_is_threshold=grpo.sampler_is_threshold if grpo.sampler_is == "token" else None,
    )


def sft_options(config: RunConfig, tokens: Tokens) -> SftOptions:
    sft = config.sft
    return SftOptions(
        max_steps=sft.max_steps,
        batch_size=sft.batch_size,
        seed=config.run.seed,
        layout=layout(config, tokens, sft.batch_size),
        optimizer=optimizer_options(sft.optimizer_config, sft.max_steps),
    )


def optimizer_options(config: OptimizerConfig, total_steps: int) -> OptimizerOptions:
    return OptimizerOptions(
        learning_rate=config.learning_rate,
        schedule_type=config.schedule_type,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def plan(config: RunConfig, tokens: Tokens) -> Plan:
    grpo, trainer = config.grpo_config, config.trainer
    return Plan(
        max_steps=trainer.max_steps,
        groups_per_step=trainer.groups_per_step,
        save_interval_steps=trainer.checkpointing_options.save_interval_steps,
        grace_s=config.services.limits.grace_s,
        seed=config.run.seed,
        keep_reference=grpo.beta > 0,
        rules=Rules(
            order=trainer.order,
            eta=grpo.off_policy_steps,
            longest=max(trainer.length_buckets),
            vocab_size=tokens.vocab_size,
            group_size=grpo.num_generations,
        ),
    )
