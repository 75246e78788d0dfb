"""All that blocks: model, optimizer and checkpoint folders behind plain calls, for one thread.

Order of calls: `restore`, `build`, then of a new run `warm_start` and `start`; of one that goes on `start`, or `step`
for each logged step and `save`; then `step` and `save` in turn.
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
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.models.arrays import Arrays, CheckpointContents, HostArray, RestoredCheckpoint
from services.trainer.models.family import Model, build, make_mesh
from services.trainer.models.initial_weights import FileLeaves, Leaves, leaves_of
from services.trainer.models.lora import initial_adapter
from services.trainer.models.options import ModelOptions
from services.trainer.models.splash import uses_splash
from services.trainer.planning import memory
from services.trainer.planning.plan import plan
from services.trainer.publishing.publications import Arrays as Takes
from services.trainer.publishing.publications import PublishedVersion
from shared.errors import ConfigError, WeightsError
from shared.findings import beyond_positions
from shared.models import adapter
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.process import telemetry
from shared.published.manifest import PublishedAdapter, WeightTree
from shared.run import checksums
from shared.run.checkpoint_files import PARAMS, Adapter, BaseWeights, ManifestLeaf, Probe
from shared.run.checksums import Checksums
from shared.run.pinned import Flat
from shared.run.state import OPTIMIZER, TrainerState
from shared.schema import RunConfig
from shared.types import WeightVersion

_log = telemetry.Log("backend")


class ModelCheckpoints(Protocol):
    """The part of `CheckpointFolders` that the model is restored from and saved to."""

    def newest(self) -> RestoredCheckpoint | None: ...

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path: ...

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights: ...

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path: ...

    def restored(self, version: WeightVersion) -> RestoredCheckpoint: ...

    def params_of(self, version: str) -> Mapping[str, HostArray]: ...

    def base_of(self, restored: RestoredCheckpoint) -> Mapping[str, HostArray]: ...

    def foreign(self, origin: Origin) -> RestoredCheckpoint: ...


class ModelPublications(Protocol):
    """The part of `Publications` that versions of the model go to."""

    def publish(
        self,
        version: WeightVersion,
        leaves: Sequence[ManifestLeaf],
        arrays: Takes,
        model: Mapping[str, Any],
        probe: Probe | None,
        adapter: PublishedAdapter | None = None,
    ) -> PublishedVersion: ...

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Takes) -> WeightTree: ...


class TunixBackend:
    """The trainer's heavy half. Every method blocks; none may run beside another.

    Args:
        warm_start: the layout of a new run's warm start, if it has one.
        publications: where versions are published; without it none are.
        options_under: the options of the policy under other settings than its own; without it there are no others.

    `memory` is what `build` reckons that training takes, in MiB, `plan` on what and with how many sequences at once.
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
        self._in_force: Flat = {}  # empty: its own
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
        """Of the mesh."""
        return math.prod(self._options.mesh_shape)

    def restore(self) -> TrainerState | None:
        """Reads the newest checkpoint; None if the run is new. Raises WeightsError."""
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        """Makes the model, from the checkpoint if there is one, if it can be trained in the memory there is. Raises
        ConfigError, WeightsError.
        """
        if not self.memory:
            self.memory = self._reckoned()
        self._model = self._policy = None
        self._model = built(self._options, self._described, self._checkpoints, self._restored)
        if self._restored is not None:
            self._policy = self._resumed(self._model, self._restored)
            self._restored = replace(self._restored, params={}, optimizer={})  # the policy has them

    def _resumed(self, model: Model, restored: RestoredCheckpoint) -> Policy:
        """Raises NonFinite."""
        reference = self._checkpoints.params_of(restored.state.reference) if restored.state.reference else None
        policy = Policy(model, self._policy_options, self._described.to_hf(), reference)
        self._in_force = {}
        policy.load_optimizer(restored.optimizer)
        policy.check()
        self._adapter = restored.adapter
        return policy

    def _reckoned(self) -> dict[str, float]:
        """Raises ConfigError if the memory there is does not suffice."""
        parts = self._described, self._options, self._policy_options
        warm_start = self._warm_start_layout if self._restored is None else None
        found = memory.estimate(*parts, warm_start)
        limit, on = memory.available(jax.local_devices()[0])
        policy = self._policy_options
        self.plan = plan(self._options, policy.layout, policy.rows_per_step, found)
        _log.info("memory", mib=found.told(), limit_mib=limit >> 20, on=on, plan=self.plan)
        memory.check(found, limit, on, lambda: memory.knobs(*parts, warm_start, found))
        return found.told()

    def warm_start(self, examples: Sequence[Example], options: SupervisedOptions) -> Iterator[SupervisedMetrics]:
        """Supervised steps on the built model, one for each item asked for."""
        assert self._model is not None
        return supervised.warm_start(self._model, examples, options)

    def start(self, state: TrainerState) -> Path:
        """The first checkpoint of this incarnation, of the weights that `build` has made; returns its folder. Raises
        NonFinite.
        """
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
            self._policy.check("the weights that RL begins with")
            base = self._checkpoints.save_base(state.version, self._policy.base())
            self._adapter = Adapter(options.lora.rank, options.lora.alpha, base)
        return self.save(state, None)

    def apply_settings(self, settings: Flat) -> None:
        """What follows is trained under these settings; model and optimizer stay, bit for bit. Raises ConfigError."""
        assert self._policy is not None
        if self._options_under is not None and settings != self._in_force:
            self._policy.apply_options(self._options_under(settings))
            self._in_force = settings

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """One step of RL on the groups; `before` is the version of the present weights. Raises NonFinite: then
        `rewind`.
        """
        assert self._policy is not None
        return self._policy.step(held, before)

    def checksum(self) -> str:
        """Of the bits of all parameters under training."""
        assert self._policy is not None
        return self._policy.checksum()

    def checksums(self) -> Checksums:
        """Of all that a checkpoint of the present weights holds. Raises NonFinite."""
        assert self._policy is not None
        leaves, _, model, probe = self._policy.published()
        described = checksums.description(model, leaves, self._adapter, probe)
        optimizer = self._policy.optimizer_checksum()
        return {PARAMS: self._policy.checksum(), OPTIMIZER: optimizer, checksums.DESCRIPTION: described}

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """See `Policy.logprob_diffs`; `present` is the version of the present weights."""
        assert self._policy is not None
        return self._policy.logprob_diffs(held, present)

    def rewind(self, version: WeightVersion) -> None:
        """Model and optimizer are again, bit for bit, those of a checkpoint of this incarnation. Raises WeightsError,
        Unavailable.
        """
        assert self._policy is not None
        restored = self._checkpoints.restored(version)
        self._policy.load(restored.params, restored.optimizer)

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        """A durable checkpoint of the present weights; returns its folder. Raises NonFinite; then nothing of it is
        there.
        """
        return self._checkpoints.save(state, self._contents(), base)

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        """`save` for later, in any thread: the present arrays are copied, to the host if all of them are this
        process's. Raises NonFinite.
        """
        self._restored = None
        return partial(self._checkpoints.save, state, copied(self._contents()), base)

    def _contents(self) -> CheckpointContents:
        assert self._policy is not None
        return replace(self._policy.contents(), adapter=self._adapter)

    def publish(self, version: WeightVersion) -> PublishedVersion:
        """Makes chunks of the present weights, as `version`; they are announced by somebody else. Raises NonFinite,
        StorageFull.
        """
        assert self._policy is not None
        assert self._publications is not None
        adapter = None
        if self._adapter is not None:
            base = self._publications.base(version.epoch, *on_host(self._policy.base()))
            adapter = PublishedAdapter(self._adapter.rank, self._adapter.alpha, base)
        return self._publications.publish(version, *self._policy.published(), adapter)


def copied(contents: CheckpointContents) -> CheckpointContents:
    """The same arrays, which no later step changes."""
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
    """The model with the weights of a checkpoint of its run, of the version of another run that it begins with, or of
    its folder. Raises ConfigError, WeightsError.
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
            "the model's files hold tensors that config.json has no place for: they are ignored, as by transformers",
            tensors=len(unread),
            first=unread[:5],
        )
    return model


def check_vocabulary(tokenizer: ChatTokenizer, model: ModelConfig) -> None:
    """Raises ConfigError if the tokenizer can make ids that the model has no embedding for."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer's largest id is {tokenizer.vocab_size - 1}, the model's vocabulary has {model.vocab_size}",
            "do they belong together?",
        )


def note_tokenizer(tokenizer: ChatTokenizer) -> None:
    """Log once if transformers 5 makes other tokens of a text."""
    if tokenizer.note is not None:
        _log.warning("transformers 5 reads the tokenizer otherwise", note=tokenizer.note)


def note_positions(config: RunConfig, model: ModelConfig) -> None:
    """Log once if sequences may be longer than the model was trained for."""
    if (note := beyond_positions(config, model)) is not None:
        _log.warning("the context is longer than the model's", note=note)


def assembled(described: ModelConfig, options: ModelOptions, leaves: Leaves, *, adapted: bool = True) -> Model:
    """The model on its mesh, with the adapters that the options ask for if it is to be `adapted`. Raises ConfigError,
    WeightsError.
    """
    mesh = make_mesh(options.mesh_shape, options.mesh_axes)
    lora = options.lora if adapted else None
    splash = uses_splash(options.attention, mesh.devices.flat[0].platform)
    return build(described, leaves, mesh, dtype=options.dtype, remat=options.remat, lora=lora, splash=splash)


def with_adapters(model: Model, described: ModelConfig, options: ModelOptions) -> Model:
    """The model with the adapters that the options ask for beside its weights; they change nothing yet."""
    present = params_of(model)
    return assembled(described, options, initial_adapter(lambda name, _: present[name], options.seed))


def merged(restored: RestoredCheckpoint, base: Mapping[str, HostArray]) -> RestoredCheckpoint:
    """The checkpoint as one of full weights. Raises WeightsError if its adapters do not fit the base."""
    if restored.adapter is None:
        return restored
    try:
        params = adapter.merged_arrays(base, restored.params, restored.adapter.scale)
    except ValueError as error:
        raise WeightsError(f"checkpoint {restored.folder.name}: {error}") from error
    return replace(restored, params=params, adapter=None)


def restored_leaves(restored: RestoredCheckpoint, base: Mapping[str, HostArray] | None = None) -> Leaves:
    """The checkpoint's parameters for `build`, and those of the base that its adapters are of; asking for one it lacks
    raises WeightsError.
    """
    params: Mapping[str, HostArray] = {**(base or {}), **restored.params}

    def leaf(name: str, size: tuple[int, ...]) -> HostArray:
        found = params.get(name)
        if found is None or found.shape != size:
            raise WeightsError(
                f"checkpoint {restored.folder.name} is of another model: {name} is"
                f" {'missing' if found is None else list(found.shape)}",
                "continue with the model the run was started with, or give it another run.name",
            )
        return found

    return leaf
