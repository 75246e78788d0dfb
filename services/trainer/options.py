"""The plain values of model, optimizer, loss and warm start, read once from the run's configuration."""

from __future__ import annotations

from pathlib import Path

from services.trainer.algorithms.registry import algorithm, ppo
from services.trainer.algorithms.sft import SftOptions
from services.trainer.learner.backend import ModelOptions
from services.trainer.learner.batch import BatchLayout
from services.trainer.learner.critic import CriticSetup
from services.trainer.learner.optimizer import OptimizerOptions
from services.trainer.learner.policy import PolicyOptions
from services.trainer.settings import TokenLimits
from shared.algorithm_schema import PpoSection
from shared.errors import ConfigError
from shared.schema import OptimizerConfig, RunConfig


def model_options(config: RunConfig, folder: Path) -> ModelOptions:
    mesh = config.trainer.mesh
    return ModelOptions(folder, config.model.dtype, config.model.remat, mesh.shape, mesh.axis_names, config.run.seed)


def layout(config: RunConfig, tokens: TokenLimits, rows_per_step: int) -> BatchLayout:
    """Raises ConfigError if the rows of a micro-batch do not divide over the mesh."""
    trainer = config.trainer
    rows = min(trainer.train_micro_batch_size or rows_per_step, rows_per_step)
    shards = dict(zip(trainer.mesh.axis_names, trainer.mesh.shape, strict=True)).get("fsdp", 1)
    if rows % shards:
        raise ConfigError(
            f"micro-batches of {rows} sequences do not divide over fsdp={shards}",
            "choose trainer.train_micro_batch_size (or sft.batch_size) as a multiple of it",
        )
    return BatchLayout(tuple(sorted(trainer.length_buckets)), rows, tokens.pad_id)


def policy_options(config: RunConfig, tokens: TokenLimits) -> PolicyOptions:
    grpo, trainer = config.grpo_config, config.trainer
    rows, updates = trainer.groups_per_step * grpo.num_generations, trainer.max_steps * grpo.num_iterations
    section, critic, waits = config.algorithm, None, 0
    if isinstance(section, PpoSection):
        waits = section.critic_warmup_steps
        critic = CriticSetup(
            ppo(section, grpo.num_iterations, grpo.max_response_length),
            optimizer_options(section.critic_optimizer_config, updates),
            waits,
        )
    return PolicyOptions(
        algorithm=critic.algorithm if critic else algorithm(section, grpo.num_iterations, grpo.max_response_length),
        aggregation=section.loss_agg_mode,
        temperature=config.rollout.sampling.temperature,
        n_iterations=grpo.num_iterations,
        max_response_length=grpo.max_response_length,
        rows_per_step=rows,
        layout=layout(config, tokens, rows),
        optimizer=optimizer_options(trainer.optimizer_config, max(1, updates - waits * grpo.num_iterations)),
        published_dtype=config.model.dtype,
        critic=critic,
    )


def sft_options(config: RunConfig, tokens: TokenLimits) -> SftOptions:
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
