"""Plain values of model, optimizer and loss, read once from the run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from services.trainer.algorithms.registry import algorithm, taught
from services.trainer.algorithms.terms.algorithm import ActorCritic, Algorithm
from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.critic import CriticSetup
from services.trainer.learner.foreign import ForeignOptions
from services.trainer.learner.optimizer import OptimizerOptions
from services.trainer.learner.policy import PolicyOptions
from services.trainer.models.lora import LoraOptions
from services.trainer.models.options import ModelOptions
from services.trainer.settings import TokenLimits
from shared import backend_kinds
from shared.algorithm_base import PolicyGradientSection
from shared.planning.micro_batch import rows_of_rl, shape_of
from shared.schema import OptimizerConfig, RunConfig


def model_options(config: RunConfig, folder: Path) -> ModelOptions:
    mesh = config.trainer.mesh
    lora = config.trainer.lora
    return ModelOptions(
        folder,
        config.model.dtype,
        config.model.remat,
        mesh.shape,
        mesh.axis_names,
        config.run.seed,
        lora=LoraOptions(lora.rank, lora.alpha, lora.target_modules) if lora else None,
        routing_replay=config.model.routing_replay,
        attention=config.trainer.attention,
        random_weights=config.model.initial_weights == "random",
    )


def layout(config: RunConfig, tokens: TokenLimits, rows_per_step: int) -> BatchLayout:
    """Choose the shapes of micro-batches. Raises ConfigError as `shape_of`."""
    shape = shape_of(config, rows_per_step)
    return BatchLayout(shape.buckets, shape.rows, tokens.pad_id, shape.tokens, shape.shards)


def policy_options(config: RunConfig, tokens: TokenLimits) -> PolicyOptions:
    grpo, trainer = config.grpo_config, config.trainer
    rows, updates = rows_of_rl(config), trainer.max_steps * grpo.num_iterations
    section = config.algorithm
    made = algorithm(section, grpo.num_iterations, grpo.max_response_length)
    critic, waits = _critic(section, made, updates), section.critic.critic_warmup_steps if section.critic else 0
    shape = layout(config, tokens, rows)
    return PolicyOptions(
        algorithm=taught(made, section),
        aggregation=section.loss_agg_mode,
        temperature=config.rollout.sampling.temperature,
        n_iterations=grpo.num_iterations,
        max_response_length=grpo.max_response_length,
        rows_per_step=rows,
        layout=shape,
        optimizer=optimizer_options(trainer.optimizer_config, max(1, updates - waits * grpo.num_iterations)),
        published_dtype=config.model.dtype,
        critic=critic,
        offload_reference=trainer.offload_reference,
        foreign=_foreign(config, shape.n_micro(rows)),
        spot_checks=trainer.spot_checks,
    )


def _foreign(config: RunConfig, n_micro: int) -> ForeignOptions | None:
    kind, grpo = backend_kinds.kind_of(config.trainer.backend), config.grpo_config
    if kind is None:
        return None
    temperature = config.rollout.sampling.temperature
    return ForeignOptions(kind, config.algorithm, temperature, n_micro, grpo.num_iterations, grpo.num_generations)


def _critic(section: PolicyGradientSection, made: Algorithm, updates: int) -> CriticSetup | None:
    keys = section.critic
    if keys is None:
        return None
    return CriticSetup(
        cast("ActorCritic", made),  # the algorithm of a section with a critic
        optimizer_options(keys.critic_optimizer_config, updates * keys.critic_updates),
        keys.critic_warmup_steps,
        keys.critic_updates,
        trains_attention=keys.critic_frozen == "none",
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
