"""Objectives of supervised steps: imitation of conversations, and preferences. Synchronous, for one thread.

Invariant: the same examples in the same order, from the same state, give bit-identical weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Protocol

import numpy as np

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
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import Loss, Reference, Scorer, divided, objective, params_of
from services.trainer.learner.train_step import Learner, Params
from services.trainer.models.arrays import HostArray
from services.trainer.models.family import Model
from volley_supervised.conversations.dataset import Example
from volley_supervised.learner.dpo import PairTerms, pair_terms, weighted_likelihood
from volley_supervised.learner.imitation import supervised_loss

type Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of an optimizer step on `rows` sequences."""

    rows: int
    layout: BatchLayout
    optimizer: OptimizerOptions


class SupervisedObjective(Protocol):
    """An objective of one learner."""

    learner: Learner
    scorer: Scorer

    def update(self, examples: Sequence[Example]) -> Measures:
        """Take one optimizer step; return at least `loss`, `grad_norm` and `tokens`, the number learned from."""
        ...

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        """Measure the present weights without changing them; return at least `loss`. Deterministic."""
        ...


class _Updates:
    """Splits rows into micro-batches and updates the model with one loss."""

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
        """Compute float64 [rows]: each row's log-probability, in nats, summed over tokens with mask 1."""
        tables = [self.scorer.logprobs(params, batch) for batch in self.batches(rows)]
        of_tokens = by_row(tables, rows, arranged(rows, self.layout, self._n_micro))
        return np.array([one.astype(np.float64).sum() for one in of_tokens])


class Imitation:
    """Mean negative log-likelihood of the learned tokens, in nats."""

    def __init__(self, model: Model, options: UpdateOptions) -> None:
        self._updates = _Updates(model, supervised_loss, options)
        self.learner, self.scorer = self._updates.learner, self._updates.scorer

    def update(self, examples: Sequence[Example]) -> Measures:
        rows = _rows(examples)
        update = self.learner.update(self._updates.batches(rows, row_weights(rows, "token-mean", 1)))
        statistics = update.statistics
        return {"loss": statistics["nll"] or 0.0, "grad_norm": update.grad_norm, "tokens": statistics["tokens"] or 0.0}

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        nll, tokens = 0.0, 0
        for part in batched(examples, self._updates.n_rows):
            rows = _rows(part)
            nll -= float(self._updates.sequence_logprobs(self.learner.params, rows).sum())
            tokens += sum(row.n_tokens for row in rows)
        return {"loss": nll / max(1, tokens), "tokens": tokens}


class Preferences:
    """DPO: see volley_supervised.learner.dpo.

    Args:
        reference: parameters of the initial policy by leaf name; None takes the model's present ones. With adapters the
            reference is their base.
        offload: keep the reference in host memory except during its passes.
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
        return {**terms.to_metrics(), "grad_norm": update.grad_norm, "tokens": update.statistics["tokens"] or 0.0}

    def weighted(self, examples: Sequence[Example]) -> tuple[PairTerms, list[Batch]]:
        """Score the pairs with the present weights.

        Returns:
            The terms of the pairs, and batches whose weighted likelihood has the gradient of the pairs' loss.
        """
        rows = _rows(examples)
        terms = self._terms(rows)
        weights = terms.weights(self._beta).ravel()
        weighted = [replace(row, advantages=np.full(len(row.ids), w)) for row, w in zip(rows, weights, strict=True)]
        return terms, self._updates.batches(weighted)

    def evaluate(self, examples: Sequence[Example]) -> Measures:
        parts = [self._terms(_rows(part)) for part in batched(examples, self._updates.n_rows // 2)]
        whole = (np.concatenate([getattr(part, name) for part in parts]) for name in PairTerms.__slots__)
        return PairTerms(*whole).to_metrics()

    def _terms(self, rows: Sequence[Row]) -> PairTerms:
        """Compute the terms of pairs; rows alternate between chosen and rejected."""
        policy, reference = (
            self._updates.sequence_logprobs(params(), rows).reshape(-1, 2)
            for params in (lambda: self.learner.params, self._reference.params)
        )
        return pair_terms(policy, reference, self._beta)


def _rows(examples: Sequence[Example]) -> list[Row]:
    return [supervised_row(one.ids, one.mask) for example in examples for one in example]
