"""All that blocks: model, optimizer and checkpoint folders behind plain calls, for one thread.

Order of calls: `restore`, `build`, `warm_start` (a new run only), `start`, then `step` and `save` in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.trainer.algorithms import sft
from services.trainer.algorithms.sft import SftMetrics, SftOptions
from services.trainer.checkpoints.store import CheckpointFolders, RestoredCheckpoint
from services.trainer.learner.metrics import StepMetrics
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.loop.group_buffer import ReadyGroup
from services.trainer.models.family import Model, Remat, build, make_mesh
from services.trainer.models.initial_weights import Leaves, leaves_of
from shared.clients.env import DemonstrationReply
from shared.errors import ConfigError, WeightsError
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.run.state import TrainerState
from shared.types import WeightVersion


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`folder` holds config.json and perhaps safetensors; `dtype` is that of activations and published parameters.

    `origin` is a version of another run whose weights a new run begins with.
    """

    folder: Path
    dtype: str
    remat: Remat
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    seed: int
    origin: Origin | None = None


class TunixBackend:
    """The trainer's heavy half. Every method blocks; none may run beside another."""

    def __init__(
        self, model: ModelOptions, described: ModelConfig, policy: PolicyOptions, checkpoints: CheckpointFolders
    ) -> None:
        self._options, self._described, self._policy_options, self._checkpoints = model, described, policy, checkpoints
        self._restored: RestoredCheckpoint | None = None
        self._model: Model | None = None
        self._policy: Policy | None = None

    def restore(self) -> TrainerState | None:
        """Reads the newest checkpoint; None if the run is new. Raises WeightsError."""
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        """Makes the model, from the checkpoint if there is one. Raises ConfigError, WeightsError."""
        options = self._options
        mesh = make_mesh(options.mesh_shape, options.mesh_axes)
        self._model = build(self._described, self._leaves(), mesh, dtype=options.dtype, remat=options.remat)

    def _leaves(self) -> Leaves:
        options = self._options
        if self._restored is not None:
            return restored_leaves(self._restored)
        if options.origin is not None:
            return restored_leaves(self._checkpoints.foreign(options.origin))
        return leaves_of(options.folder, self._described, options.seed)

    def warm_start(
        self, tokenizer: ChatTokenizer, demonstrations: Sequence[DemonstrationReply], options: SftOptions
    ) -> Iterator[SftMetrics]:
        """Supervised steps on the built model, one for each item asked for. Raises ConfigError."""
        assert self._model is not None
        rows = sft.tokenize(tokenizer, demonstrations, options.layout.buckets[-1])
        return sft.train(self._model, rows, options)

    def start(self, state: TrainerState) -> Path:
        """Readies RL and makes the first checkpoint of this incarnation; returns its folder. Raises NonFinite."""
        assert self._model is not None
        reference = self._checkpoints.params_of(state.reference) if self._restored and state.reference else None
        self._policy = Policy(self._model, self._policy_options, self._described.to_hf(), reference)
        if self._restored is None:
            return self.save(state, None)
        self._policy.load_optimizer(self._restored.optimizer)
        self._policy.check()
        folder = self._checkpoints.relabel(self._restored, state)
        self._restored = None
        return folder

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """One step of RL on the groups; `before` is the version of the present weights. Raises NonFinite: then
        `rewind`.
        """
        assert self._policy is not None
        return self._policy.step(held, before)

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
        assert self._policy is not None
        return self._checkpoints.save(state, self._policy.contents(), base)


def check_vocabulary(tokenizer: ChatTokenizer, model: ModelConfig) -> None:
    """Raises ConfigError if the tokenizer can make ids that the model has no embedding for."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {model.vocab_size}",
            "do they belong together?",
        )


def restored_leaves(restored: RestoredCheckpoint) -> Leaves:
    """The checkpoint's parameters for `build`; asking for one it lacks raises WeightsError."""
    params: Mapping[str, np.ndarray] = restored.params

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        found = params.get(name)
        if found is None or found.shape != size:
            raise WeightsError(
                f"checkpoint {restored.folder.name} is of another model: {name} is"
                f" {'missing' if found is None else list(found.shape)}",
                "continue with the model the run was started with, or give it another run.name",
            )
        return found

    return leaf
