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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.backend import memory
from services.trainer.backend.assembly import ModelCheckpoints, built, with_adapters
from services.trainer.backend.memory import PlannedMemory
from services.trainer.backend.warm_start import WarmSteps
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.learner.published import on_host
from services.trainer.learner.shapes import micro_batch
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.models.arrays import Arrays, CheckpointContents, RestoredCheckpoint
from services.trainer.models.family import Model
from services.trainer.models.options import ModelOptions
from services.trainer.publishing.publications import ModelPublications, PublishedVersion
from shared.models.config import ModelConfig
from shared.process.host_memory import release_freed
from shared.published.manifest import PublishedAdapter
from shared.run import checksums
from shared.run.checkpoint_files import PARAMS, Adapter
from shared.run.checksums import Checksums
from shared.run.pinned import Flat
from shared.run.state import OPTIMIZER, TrainerState
from shared.types import WeightVersion


class PolicyBackend:
    """Backend of RL. Every method blocks; calls must not overlap.

    Args:
        publications: publishes versions; None publishes none.
        options_under: makes the policy's options under other settings; None if settings never change.
        planned: memory that training takes; None checks none.
        check: called before the first model is made; raises ConfigError.
        warms: a new run has a warm start.

    `memory` is the memory that training takes by the estimate of `build`, in MiB; `plan` describes mesh, devices and
    micro-batches.
    """

    def __init__(
        self,
        model: ModelOptions,
        described: ModelConfig,
        policy: PolicyOptions,
        checkpoints: ModelCheckpoints,
        publications: ModelPublications | None = None,
        options_under: Callable[[Flat], PolicyOptions] | None = None,
        planned: PlannedMemory | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        warms: bool = False,
    ) -> None:
        self._publications = publications
        self._options_under = options_under
        self._planned, self._check = planned, check
        self._in_force: Flat = {}  # empty: the configuration's own
        self._options, self._described, self._policy_options, self._checkpoints = model, described, policy, checkpoints
        self._warms = warms
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
        if not self.plan:
            self._check()
            found = None
            if self._planned is not None:
                found = self._planned.checked(warm_start=self._warms and self._restored is None)
                self.memory = found.to_mib()
            policy = self._policy_options
            self.plan = memory.described(self._options, policy.layout, policy.rows_per_step, found)
        self._model = self._policy = None
        adapts = not self._warms  # a warm start trains all weights, in float32
        self._model = built(self._options, self._described, self._checkpoints, self._restored, adapts=adapts)
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

    def warm_start(self, steps: WarmSteps) -> Iterator[Any]:
        """Train the built model, as `WarmSteps.train`."""
        assert self._model is not None
        return steps.train(self._model)

    def start(self, state: TrainerState) -> Path:
        """Write the first checkpoint of this incarnation, of the built model; return its folder. Raises NonFinite."""
        if self._restored is not None:
            folder = self._checkpoints.relabel(self._restored, state)
            self._restored = None
            return folder
        assert self._model is not None
        options = self._options
        if options.lora is not None and self._model.lora is None:
            self._model = with_adapters(self._model, self._described, options)
        self._policy = Policy(self._model, self._policy_options, self._described.to_hf(), None)
        if options.lora is not None:
            self._policy.check("the first weights of RL")
            base = self._checkpoints.save_base(state.version, self._policy.base())
            self._adapter = Adapter(options.lora.rank, options.lora.alpha, base)
            release_freed()  # the base, as it was loaded and saved
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
            shapes = micro_batch(self._described, self._options, self._policy_options, layout.rows)
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

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
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
        contents = self._contents()
        release_freed()  # by the probe
        return partial(self._checkpoints.save, state, copied(contents), base)

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
    return {name: jnp.copy(x) if _stays(x) else np.array(x) for name, x in arrays.items()}


def _stays(x: Any) -> bool:
    """True for an array of JAX whose copy may stay one: Orbax would hold all of numpy's a second time while it writes.

    On accelerators a copy takes the host's memory instead, if this process has all of it.
    """
    return isinstance(x, jax.Array) and (not x.is_fully_addressable or "cpu" in {d.platform for d in x.devices()})
