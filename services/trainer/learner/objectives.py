"""What supervised steps do: learn conversations, or preferences. Synchronous, for one thread.

Invariant: both go through the learner's batches, whatever their layout is; the same examples in the same order, from
the same state, give bit-identical weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Protocol

import numpy as np

from services.trainer.algorithms.dpo import PairTerms, pair_terms, weighted_likelihood
from services.trainer.algorithms.supervised import supervised_loss
from services.trainer.batches.batch import (
    Batch,
    BatchLayout,
    Row,
    arranged,
    by_row,
    micro_batches,
    row_weights,
    supervised_row,
)
from services.trainer.conversations.dataset import Example
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import Loss, Reference, Scorer, divided, objective, params_of
from services.trainer.learner.train_step import Learner, Params
from services.trainer.models.arrays import HostArray
from services.trainer.models.family import Model

type Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """`rows` sequences make a step."""

    rows: int
    layout: BatchLayout
    optimizer: OptimizerOptions


class SupervisedObjective(Protocol):
    """Over one learner."""

    learner: Learner
    scorer: Scorer

    def update(self, examples: Sequence[Example]) -> Measures:
        """One optimizer step; at least `loss`, `grad_norm` and `tokens`, those learned from."""
        ...

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        """At least `loss`, of the present weights, which stay; the same for the same weights and examples."""
        ...


class _Updates:
    """Rows to micro-batches to updates, of one loss."""

    def __init__(self, model: Model, loss: Loss, options: UpdateOptions) -> None:
        self.layout = replace(options.layout, rows=min(options.layout.rows, options.rows))
        self.n_rows, self._n_micro = options.rows, self.layout.n_micro(options.rows)
        self.scorer = Scorer(model, 1.0)
        trained, frozen = divided(params_of(model))
        optimizer = make_optimizer(options.optimizer)
        self.learner = Learner(trained, optimizer, objective(model, loss, 1.0, "none"), frozen)

    def batches(self, rows: Sequence[Row], weights: np.ndarray | None = None) -> list[Batch]:
        return micro_batches(rows, np.zeros(len(rows)) if weights is None else weights, self.layout, self._n_micro)

    def sequence_logprobs(self, params: Params, rows: Sequence[Row]) -> np.ndarray:
        """float64 [rows]: sums over the tokens with mask 1, in nats."""
        tables = [self.scorer.logprobs(params, batch) for batch in self.batches(rows)]
        of_tokens = by_row(tables, rows, arranged(rows, self.layout, self._n_micro))
        return np.array([one.astype(np.float64).sum() for one in of_tokens])


class Imitation:
    """The mean negative log-likelihood of a learned token, in nats."""

    def __init__(self, model: Model, options: UpdateOptions) -> None:
        self._updates = _Updates(model, supervised_loss, options)
        self.learner, self.scorer = self._updates.learner, self._updates.scorer

    def update(self, examples: Sequence[Example]) -> Measures:
        rows = _rows(examples)
        update = self.learner.update(self._updates.batches(rows, row_weights(rows, "token-mean", 1)))
        told = update.statistics
        return {"loss": told["nll"] or 0.0, "grad_norm": update.grad_norm, "tokens": told["tokens"] or 0.0}

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        nll, tokens = 0.0, 0
        for part in batched(examples, self._updates.n_rows):
            rows = _rows(part)
            nll -= float(self._updates.sequence_logprobs(self.learner.params, rows).sum())
            tokens += sum(row.n_tokens for row in rows)
        return {"loss": nll / max(1, tokens), "tokens": tokens}


class Preferences:
    """DPO: see services.trainer.algorithms.dpo.

    Args:
        reference: parameters by leaf name of the policy at the start; None takes the model's present ones. With
            adapters it is their base, which stays as it is.
        offload: the reference lies in the host's memory but for its passes.
    """

    def __init__(
        self,
        model: Model,
        options: UpdateOptions,
        beta: float,
        reference: Mapping[str, HostArray] | None,
        *,
        offload: bool = False,
    ) -> None:
        self._updates, self._beta = _Updates(model, weighted_likelihood, options), beta
        self.learner, self.scorer = self._updates.learner, self._updates.scorer
        self._reference = Reference(self.learner, reference, offload=offload)

    def update(self, examples: Sequence[Example]) -> Measures:
        terms, batches = self.weighted(examples)
        update = self.learner.update(batches)
        return {**terms.told(), "grad_norm": update.grad_norm, "tokens": update.statistics["tokens"] or 0.0}

    def weighted(self, examples: Sequence[Example]) -> tuple[PairTerms, list[Batch]]:
        """What the present weights make of the pairs, and the batches whose likelihood has the gradient of their
        loss.
        """
        rows = _rows(examples)
        terms = self._terms(rows)
        weights = terms.weights(self._beta).ravel()
        weighted = [replace(row, advantages=np.full(len(row.ids), w)) for row, w in zip(rows, weights, strict=True)]
        return terms, self._updates.batches(weighted)

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        parts = [self._terms(_rows(part)) for part in batched(examples, self._updates.n_rows // 2)]
        whole = (np.concatenate([getattr(part, name) for part in parts]) for name in PairTerms.__slots__)
        return PairTerms(*whole).told()

    def _terms(self, rows: Sequence[Row]) -> PairTerms:
        """Of rows of pairs in turn, chosen and rejected."""
        policy, reference = (
            self._updates.sequence_logprobs(params(), rows).reshape(-1, 2)
            for params in (lambda: self.learner.params, self._reference.params)
        )
        return pair_terms(policy, reference, self._beta)


def _rows(examples: Sequence[Example]) -> list[Row]:
    return [supervised_row(one.ids, one.mask) for example in examples for one in example]
