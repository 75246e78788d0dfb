"""Blocking backend of RL: model, optimizer and checkpoint folders, for one thread.

Order of calls: `restore`, `build`; then for a new run `warm_start` and `start`, for a resumed one `start`, or `step`
for each logged step; then `step` and `save` in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.batches.batch import BatchLayout
from services.trainer.conversations.dataset import Example
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner import supervised
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.learner.published import on_host
from services.trainer.learner.scoring import params_of
from services.trainer.learner.supervised import SupervisedMetrics, SupervisedOptions
from services.trainer.metrics.spot_checks import ServerTokens
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.models.arrays import Arrays, CheckpointContents, HostArray, RestoredCheckpoint
from services.trainer.models.family import Model, build, make_mesh
from services.trainer.models.initial_weights import FileLeaves, Leaves, leaves_of
from services.trainer.models.lora import initial_adapter
from services.trainer.models.options import ModelOptions
from services.trainer.models.splash import uses_splash
from services.trainer.planning import memory
from services.trainer.planning.plan import plan
from services.trainer.publishing.publications import ModelPublications, PublishedVersion
from shared.errors import ConfigError, WeightsError
from shared.findings import beyond_positions
from shared.models import adapter
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.process import telemetry
from shared.published.manifest import PublishedAdapter
from shared.run import checksums
from shared.run.checkpoint_files import PARAMS, Adapter, BaseWeights
from shared.run.checksums import Checksums
from shared.run.pinned import Flat
from shared.run.state import OPTIMIZER, TrainerState
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


class TunixBackend:
    """Backend of RL with Tunix models. Every method blocks; calls must not overlap.

    Args:
        warm_start: layout of a new run's warm start, if it has one.
        publications: publishes versions; None publishes none.
        options_under: makes the policy's options under other settings; None if settings never change.

    `memory` is the memory that training takes by the estimate of `build`, in MiB; `plan` describes mesh, devices and
    micro-batches.
    """

    def __init__(
        self,
        model: ModelOptions,
        described: ModelConfig,
        policy: PolicyOptions,
        checkpoints: ModelCheckpoints,
        warm_start: BatchLayout | None = None,
        publications: ModelPublications | None = None,
        options_under: Callable[[Flat], PolicyOptions] | None = None,
    ) -> None:
        self._publications = publications
        self._options_under = options_under
        self._in_force: Flat = {}  # empty: the configuration's own
        self._options, self._described, self._policy_options, self._checkpoints = model, described, policy, checkpoints
        self._warm_start_layout = warm_start
        self.memory: Mapping[str, float] = {}
        self.plan = ""
        self._restored: RestoredCheckpoint | None = None
        self._model: Model | None = None
        self._policy: Policy | None = None
        self._adapter: Adapter | None = None

    @property
    def n_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self._options.mesh_shape)

    def restore(self) -> TrainerState | None:
        """Read the newest checkpoint; None if the run is new. Raises WeightsError."""
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        """Make the model, from the checkpoint if there is one.

        Raises ConfigError, also if memory does not suffice to train it, and WeightsError.
        """
        if not self.memory:
            self.memory = self._estimated_memory()
        self._model = self._policy = None
        self._model = built(self._options, self._described, self._checkpoints, self._restored)
        if self._restored is not None:
            self._policy = self._resumed(self._model, self._restored)
            self._restored = replace(self._restored, params={}, optimizer={})  # the policy has them

    def _resumed(self, model: Model, restored: RestoredCheckpoint) -> Policy:
        """Make the policy of a restored checkpoint. Raises NonFinite."""
        reference = self._checkpoints.params_of(restored.state.reference) if restored.state.reference else None
        policy = Policy(model, self._policy_options, self._described.to_hf(), reference)
        self._in_force = {}
        policy.load_optimizer(restored.optimizer)
        policy.check()
        self._adapter = restored.adapter
        return policy

    def _estimated_memory(self) -> dict[str, float]:
        """Estimate the memory that training takes, in MiB by part. Raises ConfigError if it is not available."""
        parts = self._described, self._options, self._policy_options
        warm_start = self._warm_start_layout if self._restored is None else None
        found = memory.estimate(*parts, warm_start)
        limit, on = memory.available(jax.local_devices()[0])
        policy = self._policy_options
        self.plan = plan(self._options, policy.layout, policy.rows_per_step, found)
        _log.info("memory", mib=found.to_mib(), limit_mib=limit >> 20, on=on, plan=self.plan)
        memory.check(found, limit, on, lambda: memory.knobs(*parts, warm_start, found))
        if found.peak_with_branches > limit:
            _log.warning(
                "memory does not suffice for episodes of several sequences",
                mib=found.peak_with_branches >> 20,
                limit_mib=limit >> 20,
                hint=f"trainer.train_micro_batch_size={policy.layout.rows // 2 or 1} if this run has such episodes",
            )
        return found.to_mib()

    def warm_start(self, examples: Sequence[Example], options: SupervisedOptions) -> Iterator[SupervisedMetrics]:
        """Train the built model lazily, one supervised step an item."""
        assert self._model is not None
        return supervised.warm_start(self._model, examples, options)

    def start(self, state: TrainerState) -> Path:
        """Write the first checkpoint of this incarnation, of the built model; return its folder. Raises NonFinite."""
        if self._restored is not None:
            folder = self._checkpoints.relabel(self._restored, state)
            self._restored = None
            return folder
        assert self._model is not None
        options = self._options
        if options.lora is not None:
            self._model = with_adapters(self._model, self._described, options)
        self._policy = Policy(self._model, self._policy_options, self._described.to_hf(), None)
        if options.lora is not None:
            self._policy.check("the first weights of RL")
            base = self._checkpoints.save_base(state.version, self._policy.base())
            self._adapter = Adapter(options.lora.rank, options.lora.alpha, base)
        return self.save(state, None)

    def apply_settings(self, settings: Flat) -> None:
        """Train the next steps under these settings; model and optimizer do not change. Raises ConfigError."""
        assert self._policy is not None
        if self._options_under is not None and settings != self._in_force:
            self._policy.apply_options(self._options_under(settings))
            self._in_force = settings

    def compile(self) -> None:
        """Compile the step, if all micro-batches have one shape; otherwise the first step of each shape does."""
        assert self._policy is not None
        layout, has_experts = self._policy_options.layout, self._described.routing is not None
        if layout.has_one_shape and not (has_experts and self._options.routing_replay):  # groups may lack experts
            shapes = memory.micro_batch(self._described, self._options, self._policy_options, layout.rows)
            self._policy.compile(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """Train one RL step on the groups; `before` is the version of the present weights.

        Raises NonFinite; the weights are then invalid until `rewind`.
        """
        assert self._policy is not None
        return self._policy.step(held, before)

    def checksum(self) -> str:
        """Checksum of the bits of all trained parameters."""
        assert self._policy is not None
        return self._policy.checksum()

    def checksums(self) -> Checksums:
        """Checksums of everything that a checkpoint of the present weights would hold. Raises NonFinite."""
        assert self._policy is not None
        model = self._policy.published()
        described = checksums.description(model.config, model.leaves, self._adapter, model.probe)
        optimizer = self._policy.optimizer_checksum()
        return {PARAMS: self._policy.checksum(), OPTIMIZER: optimizer, checksums.DESCRIPTION: described}

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """See `Policy.logprob_diffs`; `present` is the version of the present weights."""
        assert self._policy is not None
        return self._policy.logprob_diffs(held, present)

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[ServerTokens]:
        """See `Policy.spot_check`; `present` is the version of the present weights."""
        assert self._policy is not None
        return self._policy.spot_check(held, present)

    def effective_share(self, held: Sequence[ReadyGroup], present: WeightVersion) -> float:
        """See `Policy.effective_share`; `present` is the version of the present weights."""
        assert self._policy is not None
        return self._policy.effective_share(held, present)

    def rewind(self, version: WeightVersion) -> None:
        """Restore model and optimizer, bit for bit, from a checkpoint of this incarnation.

        Raises WeightsError, Unavailable.
        """
        assert self._policy is not None
        restored = self._checkpoints.restored(version)
        self._policy.load(restored.params, restored.optimizer)

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        """Write a durable checkpoint of the present weights; return its folder. Raises NonFinite before writing."""
        return self._checkpoints.save(state, self._contents(), base)

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        """Copy the present arrays; the returned function saves them later, in any thread.

        Arrays are copied to the host, or on their devices if other processes hold shards. Raises NonFinite.
        """
        self._restored = None
        return partial(self._checkpoints.save, state, copied(self._contents()), base)

    def _contents(self) -> CheckpointContents:
        assert self._policy is not None
        return replace(self._policy.contents(), adapter=self._adapter)

    def publish(self, version: WeightVersion) -> PublishedVersion:
        """Write the chunks of the present weights as `version`; the caller announces it.

        Raises NonFinite, StorageFull.
        """
        assert self._policy is not None
        assert self._publications is not None
        adapter = None
        if self._adapter is not None:
            base = self._publications.base(version.epoch, *on_host(self._policy.base()))
            adapter = PublishedAdapter(self._adapter.rank, self._adapter.alpha, base)
        return self._publications.publish(version, replace(self._policy.published(), adapter=adapter))


def copied(contents: CheckpointContents) -> CheckpointContents:
    """Copy the arrays; later steps do not change the copy."""
    master = None if contents.master is None else _copies(contents.master)
    return replace(contents, params=_copies(contents.params), optimizer=_copies(contents.optimizer), master=master)


def _copies(arrays: Arrays) -> dict[str, Any]:
    return {
        name: jnp.copy(x) if isinstance(x, jax.Array) and not x.is_fully_addressable else np.array(x)
        for name, x in arrays.items()
    }


def built(
    options: ModelOptions, described: ModelConfig, checkpoints: ModelCheckpoints, restored: RestoredCheckpoint | None
) -> Model:
    """Build the model with the weights of the restored checkpoint, of its origin in another run, or of its folder.

    Raises ConfigError, WeightsError.
    """
    if restored is not None:
        leaves = restored_leaves(restored, checkpoints.base_of(restored))
    elif options.origin is not None:
        foreign = checkpoints.foreign(options.origin)
        leaves = restored_leaves(merged(foreign, checkpoints.base_of(foreign)))
    else:
        leaves = leaves_of(options.folder, described, options.seed, random=options.random_weights)
    model = assembled(described, options, leaves, adapted=restored is not None and restored.adapter is not None)
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
    """Log a warning if transformers 5 tokenizes differently."""
    if tokenizer.note is not None:
        _log.warning("transformers 5 tokenizes differently", note=tokenizer.note)


def note_positions(config: RunConfig, model: ModelConfig) -> None:
    """Log a warning if sequences may be longer than the model was trained for."""
    if (note := beyond_positions(config, model)) is not None:
        _log.warning("the context is longer than the model was trained for", note=note)


def assembled(described: ModelConfig, options: ModelOptions, leaves: Leaves, *, adapted: bool = True) -> Model:
    """Build the model on its mesh, with the adapters of the options if `adapted`. Raises ConfigError, WeightsError."""
    mesh = make_mesh(options.mesh_shape, options.mesh_axes)
    lora = options.lora if adapted else None
    splash = uses_splash(options.attention, mesh.devices.flat[0].platform)
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
