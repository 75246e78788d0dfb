"""The policy under training: model, optimizer, reference; one call is one step. Synchronous, for one thread.

Invariants: the reference is the policy at step 0 of RL, frozen; the same groups in the same order, from the same state,
give bit-identical weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from services.trainer.algorithms.terms.algorithm import Algorithm, Episode
from services.trainer.batches.batch import (
    Aggregation,
    Batch,
    BatchLayout,
    Row,
    arranged,
    assembled,
    by_row,
    efficiency,
    left_out,
    policy_row,
    row_weights,
)
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner.checksum import checksum
from services.trainer.learner.critic import Critic, CriticSetup
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.published import PublishedWeights
from services.trainer.learner.scoring import Reference, Scorer, divided, objective, params_of
from services.trainer.learner.train_step import Learner, Objective, Params, Update
from services.trainer.metrics import step_metrics
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.models.arrays import CheckpointContents, HostArray
from services.trainer.models.family import Model
from services.trainer.publishing.publications import Arrays
from shared.run.checkpoint_files import ManifestLeaf, Probe
from shared.types import Trajectory, WeightVersion

_COMPARED = "logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """`n_iterations` are optimizer updates on the data of one step; `max_response_length` scales
    `sequence-mean-token-scale`.

    `rows_per_step` is groups times episodes; `published_dtype` that of checkpointed parameters. With
    `offload_reference` the reference lies in the host's memory but for its passes.
    """

    algorithm: Algorithm
    aggregation: Aggregation
    temperature: float
    n_iterations: int
    max_response_length: int
    rows_per_step: int
    layout: BatchLayout
    optimizer: OptimizerOptions
    published_dtype: str
    critic: CriticSetup | None = None
    offload_reference: bool = False


class Policy:
    """The model being trained by one algorithm.

    Args:
        reference: parameters by leaf name that a KL term compares with; None takes the model's present ones. A model
            with adapters is compared with its base.
    """

    def __init__(
        self,
        model: Model,
        options: PolicyOptions,
        config: Mapping[str, Any],
        reference: Mapping[str, HostArray] | None,
    ) -> None:
        self._model, self._options = model, options
        self._n_micro = options.layout.n_micro(options.rows_per_step)
        self._scorer = Scorer(model, options.temperature)
        self._published = PublishedWeights(self._scorer, config, options.published_dtype)
        trained, frozen = divided(params_of(model))
        self._learner = Learner(trained, make_optimizer(options.optimizer), _objective(model, options), frozen)
        self._probed: Probe | None = None  # of the present weights, once they are known to be finite
        self._reference: Reference | None = None
        self._critic = Critic(model, options.critic) if options.critic else None
        if options.algorithm.needs.reference:
            self._reference = Reference(self._learner, reference, offload=options.offload_reference)

    def under(self, options: PolicyOptions) -> None:
        """What follows is trained with the loss and the optimizer of these options, which may differ from the present
        ones in nothing else. Parameters, optimizer state, critic and reference stay, bit for bit.
        """
        self._options = options
        self._learner.under(make_optimizer(options.optimizer), _objective(self._model, options))
        if self._critic is not None and options.critic is not None:
            self._critic.under(options.critic)

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """Trains on complete groups; `before` is the version of the present weights, its step + 1 that of the result.

        Raises NonFinite, naming what is: then the present weights are of no use any more, but for `load`.
        """
        batches, told = self._batches(held, before)
        self._probed = None
        updates = [self._update(batches, before.step) for _ in range(self._options.n_iterations)]
        after = WeightVersion(before.epoch, before.step + 1)
        told |= {"compiled_shapes": float(self._learner.n_shapes)}
        made = StepMetrics(
            step=after.step, version=str(after), **step_metrics.of_groups(held, before.step), **_measured(updates, told)
        )
        numbers = {name: value for name, value in asdict(made).items() if isinstance(value, float)}
        self._require_finite(str(after), [name for name, value in numbers.items() if not math.isfinite(value)])
        return made

    def _update(self, batches: Sequence[Batch], step: int) -> Update:
        """Of the critic, if there is one, and of the policy, unless it waits for the critic."""
        setup = self._options.critic
        if self._critic is None or setup is None:
            return self._learner.update(batches)
        n_tokens = max(1.0, sum(float(b.mask.sum()) for b in batches))
        every = [np.full((len(b.ids), 1), 1.0 / n_tokens, np.float32) for b in batches]
        valued = self._critic.update(batches, every)
        update = self._learner.update(batches, apply=step >= setup.warmup_steps)
        told = {**update.statistics, **valued.statistics, "critic/grad_norm": valued.grad_norm}
        return replace(update, statistics=told)

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """Of each group the mean |log p(trainer) - log p(rollout)| in nats, over the tokens that the present weights
        sampled; None without any. Changes nothing.
        """
        rows = [policy_row(t, present) for h in held for t in h.group.trajectories]
        layout = self._options.layout
        parts = arranged(rows, layout, layout.n_micro(len(rows)))
        batches = assembled(rows, np.zeros(len(rows)), parts, layout.pad_id)
        scored = self._logprobs(self._learner.params, batches)
        ours = iter(zip(rows, by_row(scored, rows, parts), strict=True))
        return [_mean_difference([next(ours) for _ in h.group.trajectories]) for h in held]

    def contents(self) -> CheckpointContents:
        """What a checkpoint of the present weights holds, with adapters only these. Raises NonFinite: there is no
        checkpoint of such weights.
        """
        probe = self._probed or self._require_finite("the present weights")
        return self._published.contents(self._learner, probe, self._critic.state() if self._critic else {})

    def published(self) -> tuple[list[ManifestLeaf], Arrays, Mapping[str, Any], Probe]:
        """Of the present weights what servers get, with adapters only these: names and shapes, what takes each array to
        the host, config.json, probe. Raises NonFinite: there is no version of such weights.
        """
        probe = self._probed or self._require_finite("the present weights")
        return *self._published.published(self._learner), self._published.config, probe

    def checksum(self) -> str:
        """Of the bits of the parameters under training, those of a critic included."""
        critic = self._critic.state() if self._critic else {}
        return checksum(dict(self._learner.trained) | {f"critic {k}": v for k, v in critic.items()})

    def optimizer_checksum(self) -> str:
        """Of the bits of the optimizer's state, and of that of a critic."""
        return checksum(self._learner.optimizer_state() | (self._critic.state() if self._critic else {}))

    def base(self) -> Params:
        """The parameters that the adapters are of, in the dtype they are published in; none without adapters."""
        return self._learner.frozen

    def load_optimizer(self, state: Mapping[str, HostArray]) -> None:
        """Continues with the optimizer state of a checkpoint, and with its critic."""
        self._learner.load_optimizer_state(state)
        if self._critic is not None:
            self._critic.load(state)

    def load(self, params: Mapping[str, HostArray], optimizer: Mapping[str, HostArray]) -> None:
        """Goes back to the float32 parameters under training and the optimizer's state of a checkpoint; the reference
        stays.
        """
        self._probed = None
        self._learner.load_params(params)
        self.load_optimizer(optimizer)

    def check(self, of: str = "the restored weights") -> None:
        """Raises NonFinite if the present weights or the optimizer's state are not finite, or compute what is not."""
        self._require_finite(of)

    def _require_finite(self, of: str, metrics: Sequence[str] = ()) -> Probe:
        """The probe of the present weights. Raises NonFinite for these metrics, a parameter, the optimizer, or what
        they compute.
        """
        wrong = [*metrics, *(self._critic.non_finite() if self._critic is not None else ())]
        self._probed = self._published.probed(self._learner, of, wrong)
        return self._probed

    def _batches(self, held: Sequence[ReadyGroup], before: WeightVersion) -> tuple[list[Batch], dict[str, float]]:
        """And how much of them is padding."""
        options, groups = self._options, [h.group.trajectories for h in held]
        rows = [policy_row(trajectory, before) for group in groups for trajectory in group]
        rows = self._scored(rows)
        known = iter(rows)
        episodes = [[_episode(trajectory, next(known)) for trajectory in group] for group in groups]
        made = [one for group in options.algorithm.advantages(episodes) for one in group]
        rows = [replace(row, advantages=one) for row, one in zip(rows, made, strict=True)]
        if options.critic is not None:
            wanted = [one for group in options.critic.algorithm.returns(episodes) for one in group]
            rows = [replace(row, returns=one) for row, one in zip(rows, wanted, strict=True)]
        every = [trajectory for group in groups for trajectory in group]
        rows = [row if options.algorithm.counts(t) else left_out(row) for row, t in zip(rows, every, strict=True)]
        weights = row_weights(rows, options.aggregation, options.max_response_length)
        parts = arranged(rows, options.layout, self._n_micro)
        return assembled(rows, weights, parts, options.layout.pad_id), efficiency(parts)

    def _scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what the algorithm needs to know of their tokens. The reference is another model, which sends
        them to experts of its own choice.
        """
        needs, layout = self._options.algorithm.needs, self._options.layout
        if not (needs.reference or needs.old or needs.values):
            return list(rows)
        parts = arranged(rows, layout, self._n_micro)
        batches = assembled(rows, np.zeros(len(rows)), parts, layout.pad_id)
        tables: dict[str, list[np.ndarray]] = {}
        if self._reference is not None:
            unrouted = [replace(b, routed=None) for b in batches]
            tables["reference"] = self._logprobs(self._reference.params(), unrouted)
        if needs.old:
            tables["old"] = self._logprobs(self._learner.params, batches)
        if self._critic is not None:
            tables["values"] = [self._critic.values(b) for b in batches]
        found = {name: by_row(made, rows, parts) for name, made in tables.items()}
        return [replace(row, **{name: made[i] for name, made in found.items()}) for i, row in enumerate(rows)]

    def _logprobs(self, params: Params, batches: Sequence[Batch]) -> list[np.ndarray]:
        return [self._scorer.logprobs(params, batch) for batch in batches]


def _objective(model: Model, options: PolicyOptions) -> Objective:
    entropy = "gradient" if options.algorithm.needs.entropy else "value"
    return objective(model, options.algorithm.loss, options.temperature, entropy)


def _measured(updates: Sequence[Update], of_batches: Mapping[str, float]) -> dict[str, Any]:
    """Of several iterations on the same data: means, except the comparison with the rollout, which the
    first one makes; and what is told of the batches.
    """
    first = updates[0].statistics
    told = {
        name: first[name] if name.startswith(_COMPARED) else _mean([u.statistics[name] for u in updates])
        for name in first
    }
    loss, norm = (float(np.mean([getattr(u, name) for u in updates])) for name in ("loss", "grad_norm"))
    return {"loss": loss, "grad_norm": norm, **step_metrics.of_statistics({**told, **of_batches})}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None


def _episode(trajectory: Trajectory, row: Row) -> Episode:
    return Episode(trajectory, row.reference, row.old, row.values)


def _mean_difference(rows: Sequence[tuple[Row, np.ndarray]]) -> float | None:
    """Over the tokens of these rows that the present weights sampled: their log-probabilities are [T] beside each
    row.
    """
    found = [np.abs(ours.astype(np.float64) - row.behaviour)[row.mask * row.current > 0] for row, ours in rows]
    differences = np.concatenate(found)
    return float(differences.mean()) if len(differences) else None
