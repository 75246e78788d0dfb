"""DPO (Rafailov et al. 2023, arXiv:2305.18290): preferences without a reward model.

Of a prompt x with a chosen answer y_w and a rejected one y_l, sequence log-probabilities log π (the sum over the tokens
of an answer) and the frozen policy at the start π_ref, with

    z = beta [ (log π(y_w|x) - log π_ref(y_w|x)) - (log π(y_l|x) - log π_ref(y_l|x)) ]

the loss of a pair is -log σ(z), equation 7, and its gradient, equation 8, is

    - beta σ(-z) [ ∇ log π(y_w|x) - ∇ log π(y_l|x) ]

A pair is one number for two sequences, which may stand in different micro-batches. So z is computed of the present
policy first, and then the gradient as that of a weighted log-likelihood: every token of y_w has the weight
beta σ(-z) / n, every one of y_l the opposite one, n the pairs of the step. Both are exactly the same gradient.
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
    """float64 [n] each, of n pairs: the implicit rewards beta log(π / π_ref) of both answers, and the loss."""

    chosen: np.ndarray
    rejected: np.ndarray
    loss: np.ndarray

    def weights(self, beta: float) -> np.ndarray:
        """float64 [n, 2]: of a token of the chosen and of the rejected answer in the log-likelihood whose gradient is
        that of -(mean loss).
        """
        pull = beta * np.exp(-np.logaddexp(0.0, self.chosen - self.rejected)) / max(1, len(self.loss))
        return np.stack([pull, -pull], axis=1)

    def told(self) -> dict[str, float]:
        """Means, named as TRL names them. A tie counts half, so that the policy at the start, all ties, is told as one
        that knows nothing, not as one that is always wrong.
        """
        margins = self.chosen - self.rejected
        return {
            "loss": float(self.loss.mean()),
            "rewards/chosen": float(self.chosen.mean()),
            "rewards/rejected": float(self.rejected.mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((0.5 + 0.5 * np.sign(margins)).mean()),
        }


def pair_terms(policy: np.ndarray, reference: np.ndarray, beta: float) -> PairTerms:
    """Of sequence log-probabilities float64 [n, 2] each, chosen first, in nats."""
    chosen, rejected = (beta * (policy - reference)).T
    return PairTerms(chosen, rejected, np.logaddexp(0.0, rejected - chosen))


def weighted_likelihood(scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
    """float32 scalar: -Σ weight log π over the tokens, the weights in `advantages`; and how many `tokens` there are."""
    weight = batch.advantages * batch.mask
    return -(weight * scores.logprobs).sum(), {"tokens": statistics.total(batch.mask)}
