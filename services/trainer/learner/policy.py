"""Policy under training: model, optimizer, reference. Synchronous, for one thread.

Invariants: the reference is the policy at step 0 of RL, frozen; the same groups in the same order, from the same state,
give bit-identical weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from services.trainer import activity
from services.trainer.algorithms.terms.algorithm import Algorithm, Needs
from services.trainer.batches.batch import (
    Aggregation,
    Batch,
    BatchLayout,
    Row,
    arranged,
    assembled,
    by_row,
    efficiency,
    policy_rows,
)
from services.trainer.batches.packing import MicroBatch
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.interfaces import EpisodeScorer, RunChecks
from services.trainer.learner.baselines import Baselines
from services.trainer.learner.checksum import checksum
from services.trainer.learner.critic import Critic, CriticSetup
from services.trainer.learner.foreign import ForeignLearner, ForeignOptions, maker
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.published import PublishedWeights
from services.trainer.learner.scoring import Reference, Scorer, divided, objective, params_of
from services.trainer.learner.token_views import effective_share, mean_difference
from services.trainer.learner.train_step import Learner, Objective, Params, Update
from services.trainer.learner.training_rows import GroupRows, group_rows
from services.trainer.metrics import step_metrics
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.models.arrays import CheckpointContents, HostArray
from services.trainer.models.family import Model
from services.trainer.publishing.publications import ModelToPublish
from shared import packages
from shared.run.checkpoint_files import Probe
from shared.types import WeightVersion

_COMPARED = "logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of a policy.

    `n_iterations` is the number of optimizer updates on one step's data. `max_response_length` scales
    `sequence-mean-token-scale`. `rows_per_step` is groups times episodes, which have one row unless they branch.
    `published_dtype` is the dtype of checkpointed parameters. With `offload_reference` the reference is in host memory
    except during its passes. With `foreign`, another project computes losses and optimizer steps. `spot_checks` is
    the share of episodes for `spot_check`.
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
    foreign: ForeignOptions | None = None
    spot_checks: float = 0.0

    @property
    def needs(self) -> Needs:
        """Inputs that algorithm and learner need; a foreign one compares trainer and engine by `old`."""
        needs = self.algorithm.needs
        return replace(needs, old=True) if self.foreign else needs


class Policy:
    """A model that one algorithm trains.

    Args:
        reference: parameters by leaf name for a KL term; None takes the model's present ones. The reference of a model
            with adapters is its base.
    """

    def __init__(
        self,
        model: Model,
        options: PolicyOptions,
        config: Mapping[str, Any],
        reference: Mapping[str, HostArray] | None,
    ) -> None:
        self.model, self.options = model, options
        self._n_micro = options.layout.n_micro(options.rows_per_step)
        self._scorer = Scorer(model, options.temperature)
        self._spots: EpisodeScorer | None = None
        if options.spot_checks:
            checks: RunChecks = packages.part("run_checks")
            self._spots = checks.episode_scorer(model, self._scorer, options.temperature, options.layout)
        self._published = PublishedWeights(self._scorer, config, options.published_dtype)
        trained, frozen = divided(params_of(model))
        self._learner = _learner(model, options, trained, frozen)
        self._probed: Probe | None = None  # of the present weights, once checked to be finite
        self._baselines = Baselines()
        self._reference: Reference | None = None
        self._critic = Critic(model, options.critic) if options.critic else None
        if options.needs.reference:
            self._reference = Reference(self._learner, reference, offload=options.offload_reference)

    def apply_options(self, options: PolicyOptions) -> None:
        """Train the next steps with the loss and the optimizer of these options.

        They may differ from the present options in nothing else. Parameters, optimizer state, critic and reference do
        not change.
        """
        self.options = options
        if isinstance(self._learner, Learner):
            self._learner.configure(make_optimizer(options.optimizer), _objective(self.model, options))
        elif options.foreign is not None:
            self._learner.configure(make_optimizer(options.optimizer), options.foreign)
        if self._critic is not None and options.critic is not None:
            self._critic.apply_setup(options.critic)

    @property
    def params(self) -> Params:
        """All parameters on their devices, until the next step."""
        return self._learner.params

    def compile(self, batch: Batch) -> None:
        """Compile the update of the policy for micro-batches like this one, before the first step needs it."""
        if isinstance(self._learner, Learner):
            self._learner.compile(batch, self._n_micro)

    def step(self, ready: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """Train on complete groups; `before` is the version of the present weights.

        Raises NonFinite with the names of the non-finite values; the weights are then invalid until `load`.
        """
        batches, statistics = self._batches(ready, before)
        self._probed = None
        if self._spots is not None and self.options.spot_checks:
            self._spots.keep(before, self._learner)
        updates = [self._update(batches, before.step) for _ in range(self.options.n_iterations)]
        after = WeightVersion(before.epoch, before.step + 1)
        statistics |= {"compiled_shapes": float(self._learner.n_shapes)}
        made = StepMetrics(
            step=after.step,
            version=str(after),
            **step_metrics.of_groups(ready, before.step),
            **_measured(updates, statistics),
        )
        numbers = {name: value for name, value in asdict(made).items() if isinstance(value, float)}
        self._require_finite(str(after), [name for name, value in numbers.items() if not math.isfinite(value)])
        if (decay := self.options.needs.baseline_decay) is not None:
            groups = [one.group.trajectories for one in ready]
            self._baselines.learn(groups, decay, self.options.algorithm.counts)
        return made

    def _update(self, batches: Sequence[Batch], step: int) -> Update:
        """Update the critic, if there is one, and the policy, unless the critic is still warming up."""
        setup = self.options.critic
        if self._critic is None or setup is None:
            return self._learner.update(batches)
        n_tokens = max(1.0, sum(float(b.mask.sum()) for b in batches))
        every = [np.full((len(b.ids), 1), 1.0 / n_tokens, np.float32) for b in batches]
        valued = self._critic.update(batches, every)
        update = self._learner.update(batches, apply=step >= setup.warmup_steps)
        statistics = {**update.statistics, **valued.statistics, "critic/grad_norm": valued.grad_norm}
        return replace(update, statistics=statistics)

    def logprob_diffs(self, ready: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """Compute each group's mean |log p(trainer) - log p(rollout)|, in nats; the weights do not change.

        Only tokens that the present weights sampled count; None for a group without such tokens.
        """
        return [mean_difference(of_group) for of_group in self._compared(ready, present)]

    def spot_check(self, ready: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
        """Score a share of the episodes again, and compare servers with it; the weights do not change."""
        if self._spots is None:
            return []
        return self._spots.compare(ready, self.options.spot_checks, present, self._learner)

    def effective_share(self, ready: Sequence[ReadyGroup], present: WeightVersion) -> float:
        """Compute Kish's effective sample size of the sampled tokens, as a share of them; the weights do not change.

        A token's weight is the ratio of the present policy to the one that sampled it, not truncated.
        """
        return effective_share([one for of_group in self._compared(ready, present) for one in of_group])

    def _compared(self, ready: Sequence[ReadyGroup], present: WeightVersion) -> list[list[tuple[Row, np.ndarray]]]:
        """Score the rows of each group with the present weights: float32 [T] of each row."""
        of_groups = [[row for t in one.group.trajectories for row in policy_rows(t, present)] for one in ready]
        rows = [row for of_group in of_groups for row in of_group]
        layout = self.options.layout
        parts = arranged(rows, layout, layout.n_micro(len(rows)))
        batches = assembled(rows, np.zeros(len(rows)), parts, layout.pad_id)
        scored = self._logprobs(self._learner.params, batches)
        ours = iter(zip(rows, by_row(scored, rows, parts), strict=True))
        return [[next(ours) for _ in of_group] for of_group in of_groups]

    def contents(self) -> CheckpointContents:
        """Collect the contents of a checkpoint of the present weights; with adapters, only those.

        Raises NonFinite if the weights are not finite.
        """
        probe = self._probed or self._require_finite("the present weights")
        more = (self._critic.state() if self._critic else {}) | self._baselines.state()
        return self._published.contents(self._learner, probe, more)

    def published(self) -> ModelToPublish:
        """Describe the present weights for rollout servers; with adapters, only those.

        Raises NonFinite if the weights are not finite.
        """
        probe = self._probed or self._require_finite("the present weights")
        return ModelToPublish(*self._published.published(self._learner), self._published.config, probe)

    def checksum(self) -> str:
        """Checksum of the trained parameters and the critic."""
        critic = self._critic.state() if self._critic else {}
        return checksum(dict(self._learner.trained) | {f"critic {k}": v for k, v in critic.items()})

    def optimizer_checksum(self) -> str:
        """Checksum of the optimizer state, the critic and the baselines."""
        critic = self._critic.state() if self._critic else {}
        return checksum(self._learner.optimizer_state() | critic | self._baselines.state())

    def base(self) -> Params:
        """Base parameters of the adapters, in their published dtype; empty without adapters."""
        return self._learner.frozen

    def load_optimizer(self, state: Mapping[str, HostArray]) -> None:
        """Restore the optimizer state and the critic of a checkpoint."""
        self._learner.load_optimizer_state(state)
        self._baselines.load(state)
        if self._critic is not None:
            self._critic.load(state)

    def load(self, params: Mapping[str, HostArray], optimizer: Mapping[str, HostArray]) -> None:
        """Restore a checkpoint's trained float32 parameters and its optimizer state; the reference does not change."""
        self._probed = None
        if self._spots is not None:
            self._spots.forget()
        self._learner.load_params(params)
        self.load_optimizer(optimizer)

    def check(self, of: str = "the restored weights") -> None:
        """Raise NonFinite if the weights, the optimizer state or the probe's log-probabilities are not finite."""
        self._require_finite(of)

    def _require_finite(self, of: str, metrics: Sequence[str] = ()) -> Probe:
        """Return the probe of the present weights.

        Raises NonFinite if `metrics` names any, or if weights, optimizer state or probe are not finite.
        """
        wrong = [*metrics, *(self._critic.non_finite() if self._critic is not None else ())]
        self._probed = self._published.probed(self._learner, of, wrong)
        return self._probed

    def _batches(self, ready: Sequence[ReadyGroup], before: WeightVersion) -> tuple[list[Batch], dict[str, float]]:
        """Make the micro-batches of a step, and measure how much of them is padding."""
        rows, weights = self.rows(ready, before)
        parts = self.arranged(rows)
        measured = efficiency(parts)
        if len(rows) > sum(len(one.group.trajectories) for one in ready):
            measured["sequences"] = float(len(rows))
        return assembled(rows, weights, parts, self.options.layout.pad_id), measured

    def rows(self, ready: Sequence[ReadyGroup], before: WeightVersion) -> tuple[list[Row], np.ndarray]:
        """Make the rows of a step, and the weights of their tokens in its loss, float64 [number of rows]."""
        options, made = self.options, self.with_advantages(ready, before, self.options.needs)
        if options.critic is not None:
            made = made.with_values("returns", options.critic.algorithm.returns(made.episodes))
        return made.weighted(options.algorithm, options.aggregation, options.max_response_length)

    def with_advantages(self, ready: Sequence[ReadyGroup], before: WeightVersion, needs: Needs) -> GroupRows:
        """Make the rows of each episode, with token values and advantages."""
        groups, algorithm, baselines = [one.group.trajectories for one in ready], self.options.algorithm, None
        if needs.baseline_decay is not None:
            baselines = self._baselines.before(groups, needs.baseline_decay, algorithm.counts)
        return group_rows(groups, before, algorithm, lambda rows: self.scored(rows, needs), baselines)

    def arranged(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Arrange the rows of a step; episodes of several sequences may need more micro-batches of the same shape."""
        layout = self.options.layout
        return arranged(rows, layout, max(self._n_micro, layout.n_micro(len(rows))))

    def scored(self, of_episodes: Sequence[Sequence[Row]], needs: Needs) -> list[list[Row]]:
        """Add to the rows of each episode the token values that the algorithm needs.

        The reference is another model, so it routes tokens to experts of its own choice.
        """
        layout = self.options.layout
        if not (needs.reference or needs.old or needs.values):
            return [list(rows) for rows in of_episodes]
        rows = [row for its in of_episodes for row in its]
        parts = self.arranged(rows)
        batches = assembled(rows, np.zeros(len(rows)), parts, layout.pad_id)
        tables: dict[str, list[np.ndarray]] = {}
        if self._reference is not None:
            unrouted = [replace(b, routed=None) for b in batches]
            tables["reference"] = self._logprobs(self._reference.params(), unrouted)
        if needs.old:
            tables["old"] = self._logprobs(self._learner.params, batches)
        if self._critic is not None:
            tables["values"] = [self._critic.values(b) for b in batches]
        found: dict[str, Sequence[Any]] = {name: by_row(made, rows, parts) for name, made in tables.items()}
        scored = (replace(row, **{name: made[i] for name, made in found.items()}) for i, row in enumerate(rows))
        return [[next(scored) for _ in its] for its in of_episodes]

    def _logprobs(self, params: Params, batches: Sequence[Batch]) -> list[np.ndarray]:
        found = list[np.ndarray]()
        for batch in batches:
            found.append(self._scorer.logprobs(params, batch))
            activity.note()
        return found


def _learner(model: Model, options: PolicyOptions, trained: Params, frozen: Params) -> Learner | ForeignLearner:
    optimizer = make_optimizer(options.optimizer)
    if options.foreign is None:
        return Learner(trained, optimizer, _objective(model, options), frozen)
    return maker(options.foreign.kind)(model, trained, optimizer, options.foreign)


def _objective(model: Model, options: PolicyOptions) -> Objective:
    entropy = "gradient" if options.algorithm.needs.entropy else "value"
    return objective(model, options.algorithm.loss, options.temperature, entropy)


def _measured(updates: Sequence[Update], of_batches: Mapping[str, float]) -> dict[str, Any]:
    """Combine the metrics of several updates on the same data, and those of the batches.

    Metrics are means over the updates; the comparison with the rollout is that of the first update.
    """
    first = updates[0].statistics
    statistics = {
        name: first[name] if name.startswith(_COMPARED) else _mean([u.statistics[name] for u in updates])
        for name in first
    }
    loss, norm = (float(np.mean([getattr(u, name) for u in updates])) for name in ("loss", "grad_norm"))
    return {"loss": loss, "grad_norm": norm, **step_metrics.of_statistics({**statistics, **of_batches})}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None
