"""GRPO family in float64 numpy, written from the papers' formulas; gradients by central differences.

Works on one list entry per sequence (no padding, no batch), so it shares neither layout nor code with the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support import decoder_reference


@dataclass(frozen=True)
class Sequence_:
    """One episode: ids [T], trainable [T] (bool), behaviour and reference log-probabilities [T], advantage."""

    ids: np.ndarray
    trainable: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    advantage: float


@dataclass(frozen=True)
class ReferenceSpec:
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    algo: str = "grpo"
    kl: str = "low_var_kl"
    aggregation: str = "token-mean"
    threshold: float | None = None
    temperature: float = 1.0
    max_response_length: int = 64


def token_logprobs(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any], ids: np.ndarray, temperature: float
) -> np.ndarray:
    """float64 [T]; entry 0 is 0 because nothing precedes it."""
    table = decoder_reference.log_softmax(decoder_reference.logits(weights, config, ids), temperature)
    return np.concatenate([[0.0], table[np.arange(len(ids) - 1), ids[1:]]])


def loss(
    new: Sequence[np.ndarray], start: Sequence[np.ndarray], sequences: Sequence[Sequence_], spec: ReferenceSpec
) -> float:
    """`new`: log-probabilities of the weights being differentiated; `start`: of the weights at the start of the step
    (constants).
    """
    per_sequence = []
    for logp, logp0, s in zip(new, start, sequences, strict=True):
        m = s.trainable
        old = logp0 if spec.threshold is not None else s.behaviour
        importance = (
            np.minimum(np.exp(old - s.behaviour), spec.threshold) if spec.threshold is not None else np.ones(len(m))
        )
        ratio = np.exp(logp - old if spec.algo == "grpo" else logp - logp0 + np.mean((logp0 - old)[m]))
        surrogate = np.minimum(
            ratio * s.advantage, np.clip(ratio, 1 - spec.epsilon, 1 + spec.epsilon_high) * s.advantage
        )
        d = s.reference - logp
        kl = {"kl": -d, "mse_kl": d**2 / 2, "low_var_kl": np.exp(d) - 1 - d}[spec.kl]
        per_sequence.append((-importance * surrogate + spec.beta * kl)[m])
    return aggregate(per_sequence, spec)


def aggregate(per_sequence: Sequence[np.ndarray], spec: ReferenceSpec) -> float:
    if spec.aggregation == "token-mean":
        return float(np.concatenate(list(per_sequence)).mean())
    if spec.aggregation == "sequence-mean-token-mean":
        return float(np.mean([x.mean() for x in per_sequence]))
    if spec.aggregation == "sequence-mean-token-scale":
        return float(np.mean([x.sum() / spec.max_response_length for x in per_sequence]))
    return float(np.mean([x.sum() for x in per_sequence]))


def loss_at(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    sequences: Sequence[Sequence_],
    spec: ReferenceSpec,
    start: Sequence[np.ndarray],
) -> float:
    return loss([token_logprobs(weights, config, s.ids, spec.temperature) for s in sequences], start, sequences, spec)


def slope(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    direction: Mapping[str, np.ndarray],
    sequences: Sequence[Sequence_],
    spec: ReferenceSpec,
    start: Sequence[np.ndarray],
    h: float = 1e-5,
) -> float:
    """Derivative of the loss along `direction` in weight space."""
    ahead, behind = ({k: np.asarray(w, np.float64) + s * h * direction[k] for k, w in weights.items()} for s in (1, -1))
    return (loss_at(ahead, config, sequences, spec, start) - loss_at(behind, config, sequences, spec, start)) / (2 * h)
