"""Supervised steps over a dataset, for a warm start and for supervised runs. Synchronous, for one thread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.optimizer import OptimizerOptions
from services.trainer.learner.published import named
from services.trainer.learner.scoring import put_into
from services.trainer.models.family import Model
from shared.errors import NonFinite
from volley_supervised.conversations.dataset import Example, batches, n_steps
from volley_supervised.learner.objectives import Imitation, SupervisedObjective, UpdateOptions
from volley_supervised.metrics import SupervisedMetrics


@dataclass(frozen=True, slots=True)
class SupervisedOptions:
    """Options of supervised training.

    `max_steps` 0 means as many steps as `epochs` need. `batch_size` counts conversations, or pairs if `beta` (DPO) is
    set. With `offload_reference` DPO's reference is in host memory except during its passes.
    """

    max_steps: int
    epochs: int | None
    batch_size: int
    seed: int
    layout: BatchLayout
    optimizer: OptimizerOptions
    beta: float | None = None
    offload_reference: bool = False

    def steps(self, n_examples: int) -> int:
        return n_steps(self.max_steps, self.epochs, n_examples, self.batch_size)

    def updates(self, n_examples: int) -> UpdateOptions:
        """Options of an objective; its schedule ends with the last step."""
        rows = self.batch_size * (1 if self.beta is None else 2)
        return UpdateOptions(rows, self.layout, replace(self.optimizer, total_steps=self.steps(n_examples)))


def steps(
    objective: SupervisedObjective, examples: Sequence[Example], options: SupervisedOptions, after: int = 0
) -> Iterator[SupervisedMetrics]:
    """Train lazily: each item of the iterator is one step, from step `after` + 1 on.

    Raises NonFinite; the weights are then invalid.
    """
    last = options.steps(len(examples))
    drawn = batches(len(examples), options.batch_size, options.seed, after)
    for step in range(after + 1, last + 1):
        measures = dict(objective.update([examples[i] for i in next(drawn)]))
        _require_finite(measures, step)
        loss, norm, tokens = (measures.pop(name) for name in ("loss", "grad_norm", "tokens"))
        yield SupervisedMetrics(step, last, loss, norm, int(tokens), measures)


def warm_start(model: Model, examples: Sequence[Example], options: SupervisedOptions) -> Iterator[SupervisedMetrics]:
    """Train the model lazily, one step an item; closing the iterator puts the weights into the model.

    Raises NonFinite.
    """
    objective = Imitation(model, options.updates(len(examples)))
    try:
        yield from steps(objective, examples, options)
    finally:
        put_into(model, objective.learner.params)


def _require_finite(measures: Mapping[str, float], step: int) -> None:
    what = [name for name, value in measures.items() if not math.isfinite(value)]
    if what:
        raise NonFinite(
            f"supervised training was refused at its step {step}: {named(what)} not finite",
            "lower sft.optimizer_config.learning_rate and start a run with another name, or check the conversations",
            what,
        )
