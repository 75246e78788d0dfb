"""Views of a step's tokens: how far trainer and sampler are apart, and what the loss does with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from services.trainer.algorithms.terms.actor import TokenMasks
from services.trainer.algorithms.terms.algorithm import Algorithm
from services.trainer.algorithms.terms.importance import MAX_LOG_RATIO
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import EffectiveShare, Statistics
from services.trainer.batches.batch import Batch, Row, stored
from services.trainer.learner.scoring import objective
from services.trainer.learner.train_step import ROW_AXES, Params
from services.trainer.models.family import Model
from services.trainer.models.sharding import placed_tree
from shared.run.token_values import CLIPPED, REJECTED, TRUNCATED, TokenValues

type Compared = Sequence[tuple[Row, np.ndarray]]
"""Rows with the present policy's log-probabilities of their tokens, float32 [T]."""


def mean_difference(compared: Compared) -> float | None:
    """Mean |difference| from the sampler over tokens that the present weights sampled; None without any."""
    found = [np.abs(ours.astype(np.float64) - row.behaviour)[row.mask * row.current > 0] for row, ours in compared]
    differences = np.concatenate(found)
    return float(differences.mean()) if len(differences) else None


def effective_share(compared: Compared) -> float:
    """Effective share of the sampled tokens, whose weights are the ratios of the present policy to the sampler."""
    log_ratios = np.concatenate([(ours - row.behaviour)[row.mask > 0] for row, ours in compared])
    weights = np.exp(np.clip(log_ratios.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return EffectiveShare(weights.sum(), np.square(weights).sum(), len(weights)).value() or 0.0


class MaskReader:
    """Reads the masks of a loss at given parameters, from the same functions that compute the loss.

    Args:
        temperature: that of sampling.
    """

    def __init__(self, model: Model, algorithm: Algorithm, temperature: float) -> None:
        mesh = model.embedder.input_embedding.get_value().sharding.mesh
        self._mesh, self._rows = mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*ROW_AXES))

        def masks(scores: TokenScores, batch: Batch) -> tuple[TokenMasks, Statistics]:
            return algorithm.token_masks(scores, batch), {}

        self._read = jax.jit(objective(model, masks, temperature))

    def __call__(self, params: Params, batch: Batch) -> TokenMasks:
        """Return the masks of a micro-batch, on the host."""
        with self._mesh:
            return jax.device_get(self._read(params, placed_tree(batch, self._rows))[0])


def token_values(rows: Sequence[Row], masks: Mapping[str, np.ndarray]) -> TokenValues:
    """Return the values of an episode's stored tokens.

    Args:
        rows: rows of the episode, with the trainer's log-probabilities and advantages.
        masks: `TokenMasks` by field, float32 [N] of the stored tokens; empty if they are not known.
    """
    logprobs, advantages = stored(rows, "old"), stored(rows, "advantages")
    assert logprobs is not None
    assert advantages is not None
    values = TokenValues(logprobs.astype(np.float32), advantages.astype(np.float32))
    if not masks:
        return values
    flags = {"is_clipped": CLIPPED, "is_truncated": TRUNCATED, "is_rejected": REJECTED}
    marks = sum((masks[name] > 0).astype(np.uint8) * np.uint8(flag) for name, flag in flags.items())
    return TokenValues(values.logprobs, values.advantages, np.asarray(marks, np.uint8), masks["weight"])


def own(tables: Sequence[np.ndarray], rows: Sequence[Row]) -> np.ndarray:
    """Join arrays [T] of an episode's rows, without what they share: [N]."""
    return np.concatenate([table[row.shared :] for table, row in zip(tables, rows, strict=True)])
