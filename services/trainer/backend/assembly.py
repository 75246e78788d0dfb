"""The model under training: built from a checkpoint, another run or its folder, and checked against its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from services.trainer.learner.scoring import params_of
from services.trainer.models.arrays import Arrays, CheckpointContents, HostArray, RestoredCheckpoint
from services.trainer.models.family import Model, build, make_mesh
from services.trainer.models.initial_weights import FileLeaves, Leaves, leaves_of
from services.trainer.models.lora import initial_adapter
from services.trainer.models.options import ModelOptions
from services.trainer.models.splash import splash_kernels
from shared.errors import ConfigError, WeightsError
from shared.findings import beyond_positions
from shared.models import adapter
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.process import telemetry
from shared.run.checkpoint_files import BaseWeights
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.types import WeightVersion

_log = telemetry.Log("backend")


class ModelCheckpoints(Protocol):
    """Methods of `CheckpointFolders` that restore and save the model."""

    def newest(self) -> RestoredCheckpoint | None: ...

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path: ...

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights: ...

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path: ...

    def restored(self, version: WeightVersion) -> RestoredCheckpoint: ...

    def params_of(self, version: str) -> Mapping[str, HostArray]: ...

    def base_of(self, restored: RestoredCheckpoint) -> Mapping[str, HostArray]: ...

    def foreign(self, origin: Origin) -> RestoredCheckpoint: ...


def built(
    options: ModelOptions,
    described: ModelConfig,
    checkpoints: ModelCheckpoints,
    restored: RestoredCheckpoint | None,
    *,
    adapts: bool = False,
) -> Model:
    """Build the model with the weights of the restored checkpoint, of its origin in another run, or of its folder.

    With `adapts`, a new model has the adapters of the options at once, and its base is read in the base's dtype.

    Raises ConfigError, WeightsError.
    """
    if restored is not None:
        leaves = restored_leaves(restored, checkpoints.base_of(restored))
    elif options.origin is not None:
        foreign = checkpoints.foreign(options.origin)
        leaves = restored_leaves(merged(foreign, checkpoints.base_of(foreign)))
    else:
        leaves = leaves_of(options.folder, described, options.seed, random=options.random_weights)
    if restored is not None:
        model = assembled(described, options, leaves, adapted=restored.adapter is not None)
    else:
        first = initial_adapter(leaves, options.seed) if adapts else leaves
        model = assembled(described, options, first, adapted=adapts)
    if isinstance(leaves, FileLeaves) and (unread := leaves.unread):
        _log.warning(
            "ignoring tensors of the model's files that config.json does not describe, as transformers does",
            tensors=len(unread),
            first=unread[:5],
        )
    return model


def check_vocabulary(tokenizer: ChatTokenizer, model: ModelConfig) -> None:
    """Raise ConfigError if the tokenizer can make ids without an embedding in the model."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer's largest id is {tokenizer.vocab_size - 1}, the model's vocabulary has {model.vocab_size}",
            "use the tokenizer of this model",
        )


def note_tokenizer(tokenizer: ChatTokenizer) -> None:
    """Log a warning if transformers 5 tokenizes differently, or the chat template does not only append."""
    if tokenizer.note is not None:
        _log.warning("transformers 5 tokenizes differently", note=tokenizer.note)
    if (how := tokenizer.looks_back()) is not None:
        _log.warning(
            "conversations of several turns have several sequences",
            why=how,
            hint="the docs on models, section Tokenizer and chat template, say what follows",
        )


def note_positions(config: RunConfig, model: ModelConfig) -> None:
    """Log a warning if sequences may be longer than the model was trained for."""
    if (note := beyond_positions(config, model)) is not None:
        _log.warning("the context is longer than the model was trained for", note=note)


def assembled(described: ModelConfig, options: ModelOptions, leaves: Leaves, *, adapted: bool = True) -> Model:
    """Build the model on its mesh, with the adapters of the options if `adapted`. Raises ConfigError, WeightsError."""
    mesh = make_mesh(options.mesh_shape, options.mesh_axes)
    lora = options.lora if adapted else None
    splash = splash_kernels(options.attention, mesh, mesh.devices.flat[0].platform)
    return build(described, leaves, mesh, dtype=options.dtype, remat=options.remat, lora=lora, splash=splash)


def with_adapters(model: Model, described: ModelConfig, options: ModelOptions) -> Model:
    """Add the adapters of the options to the model; at first they do not change its output."""
    present = params_of(model)
    return assembled(described, options, initial_adapter(lambda name, _: present[name], options.seed))


def merged(restored: RestoredCheckpoint, base: Mapping[str, HostArray]) -> RestoredCheckpoint:
    """Convert the checkpoint to full weights. Raises WeightsError if its adapters do not fit the base."""
    if restored.adapter is None:
        return restored
    try:
        params = adapter.merged_arrays(base, restored.params, restored.adapter.scale)
    except ValueError as error:
        raise WeightsError(f"checkpoint {restored.folder.name}: {error}") from error
    return replace(restored, params=params, adapter=None)


def restored_leaves(restored: RestoredCheckpoint, base: Mapping[str, HostArray] | None = None) -> Leaves:
    """Return the parameters of the checkpoint, and of its adapters' base, for `build`.

    A missing parameter, or one of another shape, raises WeightsError.
    """
    params: Mapping[str, HostArray] = {**(base or {}), **restored.params}

    def leaf(name: str, size: tuple[int, ...]) -> HostArray:
        found = params.get(name)
        if found is None or found.shape != size:
            raise WeightsError(
                f"checkpoint {restored.folder.name} is of another model: {name} is"
                f" {'missing' if found is None else list(found.shape)}",
                "resume with the model that the run was started with, or choose another run.name",
            )
        return found

    return leaf
