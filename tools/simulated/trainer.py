"""`python -m tools.simulated.trainer`: the trainer with a tiny learner, for fault injection.

The learner has a few kB. Everything around the learner is the trainer's own: loop, group buffer, ledger, archive,
checkpoints, publishing. The weights are noise drawn from a digest of everything trained so far, in order. If a token,
log-probability, reward or the learning rate differs, or a group is lost, trained twice or swapped, every later bit
differs. Needs neither JAX nor a model's weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from services.trainer.app import open_trainer
from services.trainer.backend.inputs import BackendInputs, OpenedBackend
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.metrics.step_metrics import StepMetrics, of_groups, of_statistics
from services.trainer.models.arrays import Arrays, CheckpointContents, RestoredCheckpoint
from services.trainer.publishing.publications import ModelPublications, ModelToPublish, PublishedVersion
from services.trainer.settings import TokenLimits
from shared.boot import RunningService, main
from shared.errors import ConfigError, WeightsError
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.run import checksums
from shared.run.checkpoint_files import PARAMS, ManifestLeaf
from shared.run.checksums import Checksums
from shared.run.folder import RunFolder
from shared.run.pinned import Flat
from shared.run.state import OPTIMIZER, TrainerState
from shared.schema import RunConfig
from shared.supervised import supervised_steps
from shared.types import Group, WeightVersion
from tools.simulated.content import content_of

SHAPES: Mapping[str, tuple[int, ...]] = {"embedding": (32, 16), "layer.kernel": (16, 16), "layer.bias": (16,)}
_RATE = np.float32(0.1)


class NumpyArrays:
    """`ArrayFiles` of the checkpoints: one `.npy` file per leaf."""

    def write(self, folder: Path, arrays: Arrays) -> None:
        folder.mkdir()
        for name, value in arrays.items():
            np.save(folder / f"{name}.npy", np.asarray(value), allow_pickle=False)

    def read(self, folder: Path) -> dict[str, np.ndarray]:
        """Raises WeightsError and OSError."""
        try:
            return {path.stem: np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
        except ValueError as error:
            raise WeightsError(f"{folder} cannot be restored: {error}") from error


class SimulatedBackend:
    """A `Backend` without a model. `params`: float32 by leaf name. The optimizer's state is its count of groups."""

    def __init__(
        self,
        checkpoints: CheckpointFolders,
        model: Mapping[str, Any],
        seed: int,
        origin: Origin | None = None,
        publications: ModelPublications | None = None,
        learning_rate: float = 0.0,
    ) -> None:
        self._own_rate = self._rate = learning_rate
        self._publications = publications
        self._checkpoints, self._model, self._seed, self._origin = checkpoints, model, seed, origin
        self._restored: RestoredCheckpoint | None = None
        self.params: dict[str, np.ndarray] = {}
        self.memory: Mapping[str, float] = {}
        self.plan = ""
        self._count = np.zeros((), np.int64)

    def restore(self) -> TrainerState | None:
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        self._rate = self._own_rate
        if self._restored is None and self._origin is not None:
            self.params = dict(self._checkpoints.foreign(self._origin).params)
        elif self._restored is None:
            self.params = {name: noise(f"{self._seed} {name}".encode(), shape) for name, shape in SHAPES.items()}
        else:
            self.params, self._count = dict(self._restored.params), self._restored.optimizer["count"]

    def start(self, state: TrainerState) -> Path:
        if self._restored is None:
            return self.save(state, None)
        folder = self._checkpoints.relabel(self._restored, state)
        self._restored = None
        return folder

    def apply_settings(self, settings: Flat) -> None:
        self._rate = float(settings.get("trainer.optimizer_config.learning_rate", self._own_rate))

    def compile(self) -> None: ...

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        norm = sum(self._learn(h.group) for h in held)
        after = WeightVersion(before.epoch, before.step + 1)
        loss = float(np.mean([value.mean() for value in self.params.values()]))
        counts = {"tokens": float(sum(t.n_sampled for h in held for t in h.group.trajectories))}
        return StepMetrics(after.step, str(after), loss, norm, **of_groups(held, before.step), **of_statistics(counts))

    def checksum(self) -> str:
        hasher = blake3.blake3()
        for name in sorted(self.params):
            hasher.update(self.params[name].tobytes())
        return hasher.hexdigest()

    def checksums(self) -> Checksums:
        count = blake3.blake3(self._count.tobytes()).hexdigest()
        described = checksums.description(self._model, self._leaves(), None, None)
        return {PARAMS: self.checksum(), OPTIMIZER: count, checksums.DESCRIPTION: described}

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """None for each group: this backend computes no log-probabilities."""
        return [None for _ in held]

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
        return []

    def effective_share(self, held: Sequence[ReadyGroup], present: WeightVersion) -> float:
        return 1.0

    def rewind(self, version: WeightVersion) -> None:
        restored = self._checkpoints.restored(version)
        self.params, self._count = dict(restored.params), restored.optimizer["count"]

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        return self._checkpoints.save(
            state, CheckpointContents(self.params, {"count": self._count}, None, self._model, None), base
        )

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        contents = CheckpointContents(self.params, {"count": self._count}, None, self._model, None)
        return partial(self._checkpoints.save, state, contents, base)

    def publish(self, version: WeightVersion) -> PublishedVersion:
        assert self._publications is not None
        arrays = {name: partial(np.asarray, value) for name, value in self.params.items()}
        return self._publications.publish(version, ModelToPublish(self._leaves(), arrays, self._model, None))

    def _leaves(self) -> list[ManifestLeaf]:
        return [ManifestLeaf(name, value.shape, str(value.dtype)) for name, value in self.params.items()]

    def _learn(self, group: Group) -> float:
        """Change every weight by one group; returns the Euclidean norm of the change."""
        self._count = self._count + 1
        seen = blake3.blake3(self._count.tobytes() + np.float64(self._rate).tobytes())
        for name in sorted(self.params):
            seen.update(self.params[name].tobytes())
        seen.update(content_of(group))
        steps = {name: _RATE * noise(seen.digest() + name.encode(), shape) for name, shape in SHAPES.items()}
        self.params = {name: value + steps[name] for name, value in self.params.items()}
        return float(np.sqrt(sum(float(np.square(step).sum()) for step in steps.values())))


def noise(seed: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """float32 noise, uniform in [-1, 1), a pure function of `seed`."""
    n = int(np.prod(shape))
    words = np.frombuffer(blake3.blake3(seed).digest(4 * n), "<u4")
    return (words.astype(np.float64) / 2**31 - 1).astype(np.float32).reshape(shape)


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    async with open_trainer(config, _simulated) as service:
        yield service


def _simulated(given: BackendInputs) -> OpenedBackend:
    if supervised_steps(given.config) is not None:
        raise ConfigError("the simulated trainer has no warm start", "leave sft.max_steps and sft.epochs out")
    settings, model = given.settings, ModelConfig.read(given.folder)
    checkpoints = CheckpointFolders(
        RunFolder(settings.run_folder).checkpoints, settings.run, settings.max_to_keep, NumpyArrays()
    )
    rate = given.config.trainer.optimizer_config.learning_rate
    backend = SimulatedBackend(
        checkpoints, model.to_hf(), given.config.run.seed, given.origin, given.publications, rate
    )
    return OpenedBackend(backend, checkpoints, TokenLimits(model.vocab_size, given.tokenizer.pad_id))


if __name__ == "__main__":
    main("trainer", open_service=open_service)
