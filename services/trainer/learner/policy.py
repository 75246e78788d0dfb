"""The policy under training: model, optimizer, reference; one call is one step. Synchronous, for one thread.

Invariants: the reference is the policy at step 0 of RL, frozen; the same groups in the same order, from the same state,
give bit-identical weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.advantages import Estimator
from services.trainer.algorithms.loss import GRPO_SUMS, GrpoOptions, grpo_loss
from services.trainer.checkpoints.store import CheckpointContents
from services.trainer.learner import metrics
from services.trainer.learner.batch import Aggregation, Batch, BatchLayout, micro_batches, policy_rows, row_weights
from services.trainer.learner.metrics import StepMetrics
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.train_step import Logger, TunixLearner, Update
from services.trainer.loop.group_buffer import ReadyGroup
from services.trainer.models.qwen3 import Qwen3
from shared.errors import NonFinite
from shared.run.weights import Probe
from shared.types import WeightVersion

_PROBE_LENGTH = 64
_COMPUTED = "the log-probabilities of the probe"
_NAMED = 4


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """`n_iterations` are optimizer updates on the data of one step; `max_response_length` scales
    `sequence-mean-token-scale`.

    `rows_per_step` is groups times episodes; `published_dtype` that of checkpointed parameters.
    """

    loss: GrpoOptions
    aggregation: Aggregation
    estimator: Estimator
    temperature: float
    n_iterations: int
    max_response_length: int
    rows_per_step: int
    layout: BatchLayout
    optimizer: OptimizerOptions
    published_dtype: str


class Policy:
    """The model being trained by the GRPO family.

    Args:
        reference: parameters by leaf name that the KL term compares with; None takes the model's present ones.
    """

    def __init__(
        self,
        model: Qwen3,
        options: PolicyOptions,
        config: Mapping[str, Any],
        logger: Logger,
        reference: Mapping[str, np.ndarray] | None,
    ) -> None:
        self._options, self._config = options, config
        self._n_micro = options.layout.n_micro(options.rows_per_step)
        loss = functools.partial(grpo_loss, options=options.loss)
        self._learner = TunixLearner(
            model,
            make_optimizer(options.optimizer),
            loss,
            sums=GRPO_SUMS,
            temperature=options.temperature,
            n_micro=self._n_micro,
            logger=logger,
        )
        self._probed: Probe | None = None  # of the present weights, once they are known to be finite
        self._reference: Any = None
        if options.loss.beta:
            self._reference = self._learner.snapshot(reference)

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """Trains on complete groups; `before` is the version of the present weights, its step + 1 that of the result.

        Raises NonFinite, naming what is: then the present weights are of no use any more, but for `load`.
        """
        batches = self._batches(held, before)
        self._probed = None
        updates = [self._learner.update(batches) for _ in range(self._options.n_iterations)]
        after = WeightVersion(before.epoch, before.step + 1)
        made = StepMetrics(
            step=after.step, version=str(after), **metrics.of_groups(held, before.step), **_measured(updates)
        )
        numbers = {name: value for name, value in asdict(made).items() if isinstance(value, float)}
        self._require_finite(str(after), [name for name, value in numbers.items() if not math.isfinite(value)])
        return made

    def contents(self) -> CheckpointContents:
        """What a checkpoint of the present weights holds. Raises NonFinite: there is no checkpoint of such weights."""
        probe = self._probed or self._require_finite("the present weights")
        params = self._learner.params()
        master = None
        if self._options.published_dtype != "float32":
            master, params = params, {k: v.astype(jnp.dtype(self._options.published_dtype)) for k, v in params.items()}
        return CheckpointContents(params, self._learner.optimizer_state(), master, self._config, probe)

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues with the optimizer state of a checkpoint."""
        self._learner.load_optimizer_state(state)

    def load(self, params: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray]) -> None:
        """Goes back to the float32 parameters and the optimizer's state of a checkpoint; the reference stays."""
        self._probed = None
        self._learner.load_params(params)
        self._learner.load_optimizer_state(optimizer)

    def check(self) -> None:
        """Raises NonFinite if the present weights or the optimizer's state are not finite, or compute what is not."""
        self._require_finite("the restored weights")

    def _require_finite(self, of: str, metrics: Sequence[str] = ()) -> Probe:
        """The probe of the present weights. Raises NonFinite for these metrics, a parameter, the optimizer, or what
        they compute.
        """
        what = [*metrics, *self._learner.non_finite(self._options.published_dtype)]
        probe = self._probe()
        if not all(map(math.isfinite, [*probe.logprobs, probe.noise or 0.0])):
            what.append(_COMPUTED)
        if what:
            raise NonFinite(f"{of}: {named(what)} not finite", "a lower learning rate may help", what)
        self._probed = probe
        return probe

    def _batches(self, held: Sequence[ReadyGroup], before: WeightVersion) -> list[Batch]:
        options = self._options
        rows = policy_rows((h.group for h in held), options.estimator, before)
        weights = row_weights(rows, options.aggregation, options.max_response_length)
        batches = micro_batches(rows, weights, options.layout, self._n_micro)
        if self._reference is not None:
            batches = [replace(b, reference=self._learner.logprobs(b, self._reference)) for b in batches]
        if options.n_iterations > 1 and options.loss.sampler_is_threshold is not None:
            batches = [replace(b, old=self._learner.logprobs(b)) for b in batches]
        return batches

    def _probe(self) -> Probe:
        """A fixed prompt, spread over the vocabulary, and its log-probabilities at temperature 1 under the present
        weights.
        """
        ids = (np.arange(_PROBE_LENGTH, dtype=np.int64) * 7919 + 11) % self._config["vocab_size"]
        logprobs, noise = self._learner.probe(ids.astype(np.int32))
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
    sums = {name: float(np.mean([u.sums[name] for u in updates])) for name in updates[0].sums}
    sums |= {name: updates[0].sums[name] for name in ("delta", "delta_current", "delta_current_max")}
    loss, norm = (float(np.mean([getattr(u, name) for u in updates])) for name in ("loss", "grad_norm"))
    return {"loss": loss, "grad_norm": norm, **metrics.of_sums(sums)}
