"""Blocking backend of supervised training: model, optimizer and checkpoint folders, for one thread.

Order of calls: `restore`, `build`, `open`, then `save` or `relabel`, then `step`, `evaluate` and `save` in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.trainer.backend.assembly import built, with_adapters
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.learner.published import PublishedWeights
from services.trainer.models.arrays import RestoredCheckpoint
from services.trainer.models.family import Model
from services.trainer.models.options import ModelOptions
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import Adapter
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_supervised.conversations.dataset import Example
from volley_supervised.learner.objectives import Imitation, Preferences, SupervisedObjective
from volley_supervised.learner.steps import SupervisedOptions, steps
from volley_supervised.metrics import SupervisedMetrics


class SupervisedBackend:
    """Backend of supervised training. Every method blocks; calls must not overlap."""

    def __init__(
        self, model: ModelOptions, described: ModelConfig, options: SupervisedOptions, checkpoints: CheckpointFolders
    ) -> None:
        self._options, self._described, self.training, self._checkpoints = model, described, options, checkpoints
        self._restored: RestoredCheckpoint | None = None
        self._model: Model | None = None
        self._objective: SupervisedObjective | None = None
        self._published: PublishedWeights | None = None
        self._steps: Iterator[SupervisedMetrics] = iter(())
        self._adapter: Adapter | None = None

    def restore(self) -> TrainerState | None:
        """Read the newest checkpoint; None if the run is new. Raises WeightsError."""
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        """Make the model, from the checkpoint if there is one. Raises ConfigError, WeightsError."""
        self._model = built(self._options, self._described, self._checkpoints, self._restored)

    def open(self, examples: Sequence[Example]) -> int:
        """Prepare the steps after the checkpoint's on these examples; return the number of the last step.

        Raises NonFinite, WeightsError.
        """
        assert self._model is not None
        found, options = self._restored, self.training
        if found is None and self._options.lora is not None:
            self._model = with_adapters(self._model, self._described, self._options)
        self._objective = objective = self._objective_for(self._model, options, len(examples))
        self._published = PublishedWeights(objective.scorer, self._described.to_hf(), self._options.dtype)
        if found is not None:
            objective.learner.load_optimizer_state(found.optimizer)
            self._published.probed(objective.learner, "the restored weights")
            self._adapter = found.adapter
        self._steps = steps(objective, examples, options, found.state.step if found else 0)
        return options.steps(len(examples))

    def _objective_for(self, model: Model, options: SupervisedOptions, n_examples: int) -> SupervisedObjective:
        updates = options.updates(n_examples)
        if options.beta is None:
            return Imitation(model, updates)
        start = self._restored.state.reference if self._restored and model.lora is None else None
        reference = None if start is None else self._checkpoints.params_of(start)
        return Preferences(model, updates, options.beta, reference, offload=options.offload_reference)

    def step(self) -> SupervisedMetrics | None:
        """Train the next step; None after the last. Raises NonFinite."""
        return next(self._steps, None)

    def evaluate(self, examples: Sequence[Example]) -> Mapping[str, float]:
        """See `SupervisedObjective.evaluate`."""
        assert self._objective is not None
        return self._objective.evaluate(examples)

    def relabel(self, state: TrainerState) -> Path:
        """Save the restored checkpoint as the first one of this incarnation; return its folder."""
        assert self._restored is not None
        folder = self._checkpoints.relabel(self._restored, state)
        self._restored = None
        return folder

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        """Write a durable checkpoint of the present weights; return its folder. Raises NonFinite before writing."""
        assert self._objective is not None
        assert self._published is not None
        learner, lora = self._objective.learner, self._options.lora
        probe = self._published.probed(learner, str(state.version))
        if self._adapter is None and lora is not None:
            of = self._checkpoints.save_base(state.version, learner.frozen)
            self._adapter = Adapter(lora.rank, lora.alpha, of)
        contents = replace(self._published.contents(learner, probe, {}), adapter=self._adapter)
        return self._checkpoints.save(state, contents, base)
