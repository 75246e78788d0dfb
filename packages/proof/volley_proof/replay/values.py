"""Values of the tokens that a step on archived groups would start from, and marks of how its loss treats each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from services.trainer.algorithms.terms.actor import TokenMasks
from services.trainer.algorithms.terms.algorithm import Algorithm, Needs
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch, Row, assembled, by_row, stored
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner.policy import Policy
from services.trainer.learner.scoring import objective
from services.trainer.learner.train_step import ROW_AXES, Params
from services.trainer.models.family import Model
from services.trainer.models.sharding import placed_tree
from shared.run.token_values import CLIPPED, REJECTED, TRUNCATED, TokenValues
from shared.types import WeightVersion


def values_of(policy: Policy, ready: Sequence[ReadyGroup], before: WeightVersion) -> list[list[TokenValues]]:
    """Return what a step on these groups would start from, by group and episode; the weights do not change."""
    needs = policy.options.needs
    rows = policy.with_advantages(ready, before, needs).rows
    if not needs.old:  # scored afterwards: advantages with a KL term would use it
        rows = policy.scored(rows, Needs(old=True))
    known = zip(rows, _masks_of_tokens(policy, ready, before, rows), strict=True)
    return [[token_values(*next(known)) for _ in one.group.trajectories] for one in ready]


def _masks_of_tokens(
    policy: Policy, ready: Sequence[ReadyGroup], before: WeightVersion, of_episodes: Sequence[Sequence[Row]]
) -> list[dict[str, np.ndarray]]:
    """`TokenMasks` of each episode in the first update of a step on these groups; empty with foreign losses."""
    options = policy.options
    if options.foreign is not None:
        return [{} for _ in of_episodes]
    rows, weights = policy.rows(ready, before)
    parts, read = policy.arranged(rows), MaskReader(policy.model, options.algorithm, options.temperature)
    found = [read(policy.params, batch) for batch in assembled(rows, weights, parts, options.layout.pad_id)]
    tables = {name: by_row([getattr(one, name) for one in found], rows, parts) for name in TokenMasks._fields}
    made, start = list[dict[str, np.ndarray]](), 0
    for its in of_episodes:
        at = slice(start, start := start + len(its))
        made.append({name: own(table[at], rows[at]) for name, table in tables.items()})
    return made


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
