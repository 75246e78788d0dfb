"""Supervised loss: negative log-likelihood of the tokens to imitate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch


def supervised_loss(scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
    """Compute the loss, float32 scalar, weighted by `weight`; and `tokens` and their mean `nll`, in nats."""
    nll = -jnp.where(batch.mask > 0, scores.logprobs, 0.0)
    loss = (nll * batch.mask * batch.weight).sum()
    return loss, {"tokens": statistics.total(batch.mask), "nll": statistics.mean(nll, batch.mask)}
