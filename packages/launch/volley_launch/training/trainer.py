"""Memory of the trainer on each device, from the configuration alone."""

from __future__ import annotations

from dataclasses import replace

from shared import backend_kinds
from shared.backend_kinds import BackendKind
from shared.models.config import ModelConfig
from shared.models.parameters import Shapes, parameters
from shared.planning.micro_batch import MicroBatchShape, rows_of_step, shape_of
from shared.planning.serving import Platform
from shared.schema import SPLASH_UNIT, RunConfig
from shared.supervised import supervised_steps
from volley_launch.training import memory as training
from volley_launch.training.activations import BatchSize, activations
from volley_launch.training.memory import MemoryEstimate, TrainingSetup

_POSITION_BYTES = 30  # of a micro-batch's arrays, for each position
_BYTE = 256  # experts that one byte tells apart, beside "none"


def estimate(config: RunConfig, model: ModelConfig, platform: Platform, *, warm_start: bool = True) -> MemoryEstimate:
    """Estimate the memory of the run's training; without `warm_start`, of a run that is past it.

    Raises ConfigError if micro-batches have no valid shape.
    """
    supervised = config.is_supervised
    n_rows = rows_of_step(config)
    shape = shape_of(config, n_rows)
    batch = _on_device(config, shape, platform)
    step = {
        "activations": activations(model, batch),
        "micro-batch": batch.n_positions * (_POSITION_BYTES + _routed_bytes(config, model)),
    }
    if (foreign := _foreign(config)) is not None:
        step["logits of the loss"] = 4 * foreign.n_logits * batch.n_positions * model.vocab_size
    warming = None
    if warm_start and not supervised and (first := supervised_steps(config)) is not None:
        rows = shape_of(config, first.rows).rows
        warming = round(step["activations"] * rows / shape.rows)
    n_micro = max(1, -(-n_rows // shape.rows))
    setup = replace(_setup(config), n_micro=n_micro, on_host=platform == "cpu")
    found = training.estimate(_shapes(config, model), setup, step, warming)
    return replace(found, saves_between=supervised, saves_last=not supervised and _saves_last(config))


def checkpoint_bytes(config: RunConfig, model: ModelConfig) -> int:
    """Bytes of a checkpoint: parameters under training, optimizer state, critic and published parameters."""
    return training.estimate(_shapes(config, model), replace(_setup(config), mesh={}), {}).host_copies


def _shapes(config: RunConfig, model: ModelConfig) -> Shapes:
    lora = config.trainer.lora
    return parameters(model, lora.rank, lora.target_modules) if lora else parameters(model)


def _setup(config: RunConfig) -> TrainingSetup:
    """Read the settings that do not depend on devices and micro-batches."""
    critic = None if config.is_supervised else config.algorithm.critic
    return TrainingSetup(
        mesh=config.trainer.mesh.sizes,
        dtype=config.model.dtype,
        published_dtype=config.model.dtype,
        adapts=config.trainer.lora is not None,
        reference=has_reference(config),
        offload_reference=config.trainer.offload_reference,
        has_critic=critic is not None,
        trains_attention=critic is None or critic.critic_frozen == "none",
        may_branch=not config.is_supervised and _foreign(config) is None,
        keeps_former=not config.is_supervised and config.trainer.spot_checks > 0,
    )


def _saves_last(config: RunConfig) -> bool:
    """True if no step follows a checkpoint of RL: only the first weights and the last ones are saved."""
    evaluated = config.orchestrator.eval_every_n_steps
    apart = (config.trainer.checkpointing_options.save_interval_steps, evaluated or config.trainer.max_steps)
    return min(apart) >= config.trainer.max_steps


def _foreign(config: RunConfig) -> BackendKind | None:
    """Backend of another project that the run trains with, if it does."""
    return None if config.is_supervised else backend_kinds.kind_of(config.trainer.backend)


def has_reference(config: RunConfig) -> bool:
    """True if a frozen copy of the first weights is needed: for DPO, or a KL term of RL."""
    return config.mode == "dpo" or (not config.is_supervised and config.algorithm.beta > 0)


def _on_device(config: RunConfig, shape: MicroBatchShape, platform: Platform) -> BatchSize:
    trainer = config.trainer
    rows, length = max(1, shape.rows // trainer.mesh.sizes.get("fsdp", 1)), shape.buckets[-1]
    allowed = trainer.attention != "blocks" and platform == "tpu"
    return BatchSize(
        rows,
        length,
        dtype=config.model.dtype,
        remat=config.model.remat,
        splash=allowed and length % SPLASH_UNIT == 0,
        adapts=trainer.lora is not None,
        mesh=trainer.mesh.sizes,
        on_host=platform == "cpu",
    )


def _routed_bytes(config: RunConfig, model: ModelConfig) -> int:
    """Bytes of a position's experts in a micro-batch."""
    if model.routing is None or not config.model.routing_replay or config.is_supervised:
        return 0
    n_layers, n_experts, per_token = model.routing
    return n_layers * per_token * (2 if n_experts <= _BYTE else 4)
