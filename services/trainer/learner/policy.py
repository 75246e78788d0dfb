"""The policy under training: model, optimizer, reference; one call is one step. Synchronous, for one thread.

Invariants: the reference is the policy at step 0 of RL, frozen; the same groups in the same order, from the same state,
give bit-identical weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms.algorithm import Algorithm, Episode
from services.trainer.checkpoints.store import CheckpointContents
from services.trainer.learner import metrics
from services.trainer.learner.batch import (
    Aggregation,
    Batch,
    BatchLayout,
    Row,
    arranged,
    by_row,
    left_out,
    micro_batches,
    policy_row,
    row_weights,
)
from services.trainer.learner.critic import Critic, CriticSetup
from services.trainer.learner.metrics import StepMetrics
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import Scorer, objective, params_of
from services.trainer.learner.train_step import Learner, Params, Update, placed_as, snapshot
from services.trainer.loop.group_buffer import ReadyGroup
from services.trainer.models.family import Model
from shared.errors import NonFinite
from shared.run.weights import Probe
from shared.types import Trajectory, WeightVersion

_PROBE_LENGTH = 64
_COMPUTED = "the log-probabilities of the probe"
_NAMED = 4
_COMPARED = "logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """`n_iterations` are optimizer updates on the data of one step; `max_response_length` scales
    `sequence-mean-token-scale`.

    `rows_per_step` is groups times episodes; `published_dtype` that of checkpointed parameters.
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


class Policy:
    """The model being trained by one algorithm.

    Args:
        reference: parameters by leaf name that a KL term compares with; None takes the model's present ones.
    """

    def __init__(
        self,
        model: Model,
        options: PolicyOptions,
        config: Mapping[str, Any],
        reference: Mapping[str, np.ndarray] | None,
    ) -> None:
        self._options, self._config = options, config
        self._n_micro = options.layout.n_micro(options.rows_per_step)
        self._scorer = Scorer(model, options.temperature)
        needs = options.algorithm.needs
        entropy = "gradient" if needs.entropy else "value"
        self._learner = Learner(
            params_of(model),
            make_optimizer(options.optimizer),
            objective(model, options.algorithm.loss, options.temperature, entropy),
        )
        self._probed: Probe | None = None  # of the present weights, once they are known to be finite
        self._reference: Params | None = None
        self._critic = Critic(model, options.critic) if options.critic else None
        if needs.reference:
            present = self._learner.params
            self._reference = snapshot(present) if reference is None else placed_as(present, reference)

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """Trains on complete groups; `before` is the version of the present weights, its step + 1 that of the result.

        Raises NonFinite, naming what is: then the present weights are of no use any more, but for `load`.
        """
        batches = self._batches(held, before)
        self._probed = None
        updates = [self._update(batches, before.step) for _ in range(self._options.n_iterations)]
        after = WeightVersion(before.epoch, before.step + 1)
        made = StepMetrics(
            step=after.step, version=str(after), **metrics.of_groups(held, before.step), **_measured(updates)
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
        every = [np.full(len(b.row_weight), 1.0 / n_tokens, np.float32) for b in batches]
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
        n_micro = layout.n_micro(len(rows))
        batches = micro_batches(rows, np.zeros(len(rows)), layout, n_micro)
        scored = [self._scorer.logprobs(self._learner.params, batch) for batch in batches]
        ours = iter(zip(rows, by_row(scored, rows, arranged(rows, layout, n_micro)), strict=True))
        return [_mean_difference([next(ours) for _ in h.group.trajectories]) for h in held]

    def contents(self) -> CheckpointContents:
        """What a checkpoint of the present weights holds. Raises NonFinite: there is no checkpoint of such weights."""
        probe = self._probed or self._require_finite("the present weights")
        params: Mapping[str, Any] = self._learner.params
        master = None
        if self._options.published_dtype != "float32":
            master, params = params, {k: v.astype(jnp.dtype(self._options.published_dtype)) for k, v in params.items()}
        training = self._learner.optimizer_state() | (self._critic.state() if self._critic else {})
        return CheckpointContents(params, training, master, self._config, probe)

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues with the optimizer state of a checkpoint, and with its critic."""
        self._learner.load_optimizer_state(state)
        if self._critic is not None:
            self._critic.load(state)

    def load(self, params: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray]) -> None:
        """Goes back to the float32 parameters and the optimizer's state of a checkpoint; the reference stays."""
        self._probed = None
        self._learner.load_params(params)
        self.load_optimizer(optimizer)

    def check(self) -> None:
        """Raises NonFinite if the present weights or the optimizer's state are not finite, or compute what is not."""
        self._require_finite("the restored weights")

    def _require_finite(self, of: str, metrics: Sequence[str] = ()) -> Probe:
        """The probe of the present weights. Raises NonFinite for these metrics, a parameter, the optimizer, or what
        they compute.
        """
        what = [*metrics, *self._learner.non_finite(self._options.published_dtype)]
        what += self._critic.non_finite() if self._critic is not None else []
        probe = self._probe()
        if not all(map(math.isfinite, [*probe.logprobs, probe.noise or 0.0])):
            what.append(_COMPUTED)
        if what:
            raise NonFinite(f"{of}: {named(what)} not finite", "a lower learning rate may help", what)
        self._probed = probe
        return probe

    def _batches(self, held: Sequence[ReadyGroup], before: WeightVersion) -> list[Batch]:
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
        return micro_batches(rows, weights, options.layout, self._n_micro)

    def _scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what the algorithm needs to know of their tokens."""
        needs, layout = self._options.algorithm.needs, self._options.layout
        if not (needs.reference or needs.old or needs.values):
            return list(rows)
        parts = arranged(rows, layout, self._n_micro)
        batches = micro_batches(rows, np.zeros(len(rows)), layout, self._n_micro)
        tables: dict[str, list[np.ndarray]] = {}
        if self._reference is not None:
            tables["reference"] = [self._scorer.logprobs(self._reference, b) for b in batches]
        if needs.old:
            tables["old"] = [self._scorer.logprobs(self._learner.params, b) for b in batches]
        if self._critic is not None:
            tables["values"] = [self._critic.values(b) for b in batches]
        found = {name: by_row(made, rows, parts) for name, made in tables.items()}
        return [replace(row, **{name: made[i] for name, made in found.items()}) for i, row in enumerate(rows)]

    def _probe(self) -> Probe:
        """A fixed prompt, spread over the vocabulary, and its log-probabilities at temperature 1 under the present
        weights.
        """
        ids = (np.arange(_PROBE_LENGTH, dtype=np.int64) * 7919 + 11) % self._config["vocab_size"]
        logprobs, noise = self._scorer.probe(self._learner.params, ids.astype(np.int32))
        return Probe(tuple(ids.tolist()), tuple(float(x) for x in logprobs), noise)


def named(what: Sequence[str]) -> str:
    """A list for a sentence, with its verb: the first few, and how many more."""
    shown = ", ".join(what[:_NAMED])
    more = f" and {len(what) - _NAMED} more" if len(what) > _NAMED else ""
    return f"{shown}{more} {'is' if len(what) == 1 else 'are'}"


def _measured(updates: Sequence[Update]) -> dict[str, Any]:
    """Of several iterations on the same data: means, except the comparison with the rollout, which the
    first one makes.
    """
    first = updates[0].statistics
    told = {
        name: first[name] if name.startswith(_COMPARED) else _mean([u.statistics[name] for u in updates])
        for name in first
    }
    loss, norm = (float(np.mean([getattr(u, name) for u in updates])) for name in ("loss", "grad_norm"))
    return {"loss": loss, "grad_norm": norm, **metrics.of_statistics(told)}


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
