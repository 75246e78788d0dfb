"""DPO (Rafailov et al. 2023, arXiv:2305.18290): preferences without a reward model.

For a prompt x with a chosen answer y_w and a rejected one y_l, sequence log-probabilities log π (the sum over the
tokens of an answer) and the frozen initial policy π_ref, with

    z = beta [ (log π(y_w|x) - log π_ref(y_w|x)) - (log π(y_l|x) - log π_ref(y_l|x)) ]

the loss of a pair is -log σ(z), equation 7, and its gradient, equation 8, is

    - beta σ(-z) [ ∇ log π(y_w|x) - ∇ log π(y_l|x) ]

A pair has one loss for two sequences, which may be in different micro-batches. So z is computed first, with the present
policy, and then the gradient as that of a weighted log-likelihood: each token of y_w has the weight beta σ(-z) / n,
each token of y_l its negative, for n pairs in the step. This gradient is exactly that of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch


@dataclass(frozen=True, slots=True)
class PairTerms:
    """Implicit rewards beta log(π / π_ref) of both answers, and the loss; float64 [n] each, for n pairs."""

    chosen: np.ndarray
    rejected: np.ndarray
    loss: np.ndarray

    def weights(self, beta: float) -> np.ndarray:
        """Compute float64 [n, 2]: the weights of a chosen and a rejected answer's tokens in the log-likelihood whose
        gradient is that of -(mean loss).
        """
        pull = beta * np.exp(-np.logaddexp(0.0, self.chosen - self.rejected)) / max(1, len(self.loss))
        return np.stack([pull, -pull], axis=1)

    def to_metrics(self) -> dict[str, float]:
        """Means under TRL's names. A tie counts half: the initial policy, all ties, has an accuracy of 0.5, not 0."""
        margins = self.chosen - self.rejected
        return {
            "loss": float(self.loss.mean()),
            "rewards/chosen": float(self.chosen.mean()),
            "rewards/rejected": float(self.rejected.mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((0.5 + 0.5 * np.sign(margins)).mean()),
        }


def pair_terms(policy: np.ndarray, reference: np.ndarray, beta: float) -> PairTerms:
    """Compute the terms from sequence log-probabilities in nats, float64 [n, 2] each, chosen first."""
    chosen, rejected = (beta * (policy - reference)).T
    return PairTerms(chosen, rejected, np.logaddexp(0.0, rejected - chosen))


def weighted_likelihood(scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
    """Compute the loss, float32 scalar: -Σ weight log π over tokens, weights in `advantages`; and count `tokens`."""
    weight = batch.advantages * batch.mask
    return -(weight * scores.logprobs).sum(), {"tokens": statistics.total(batch.mask)}
