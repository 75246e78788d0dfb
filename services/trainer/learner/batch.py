"""Groups to fixed-shape batches of whole sequences, right-padded.

Invariants:
- position t of `targets`, `mask`, `behaviour`, `advantages` and `current` belongs to the token at t + 1: what the
  hidden state at t predicts;
- a micro-batch has one of few lengths (the buckets) and always the same number of rows, so compiled shapes are bounded;
- `row_weight` carries the *global* denominators of the step, so losses and gradients of the micro-batches add up to
  those of the whole batch, whatever their token counts;
- what stands at a position with mask 0 never matters, and is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from shared.errors import DecodeError
from shared.types import Trajectory, WeightVersion

Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows and T positions; a pytree for JAX.

    ids, targets: int32 [B, T]. mask: float32 [B, T], 1 where the target was sampled by the policy.
    behaviour, advantages: float32 [B, T]. current: float32 [B, T], 1 where sampled by the weights now being trained.
    row_weight: float32 [B]. reference, old: float32 [B, T] log-probabilities of the reference model and of the policy
    at the start of the step; values, returns: float32 [B, T], what the critic expected before the token at the start
    of the step, and what it should have. None where the objective does not need them.
    """

    ids: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    current: np.ndarray
    row_weight: np.ndarray
    reference: np.ndarray | None = None
    old: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None


_OPTIONAL = ("reference", "old", "values", "returns")
jax.tree_util.register_dataclass(
    Batch,
    data_fields=["ids", "targets", "mask", "behaviour", "advantages", "current", "row_weight", *_OPTIONAL],
    meta_fields=[],
)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: ids int32 [T], mask [T], behaviour log-probabilities [T], current [T], advantages [T]; and [T] each
    what `Batch` may have, in every row of a step or in none.
    """

    ids: np.ndarray
    mask: np.ndarray
    behaviour: np.ndarray
    current: np.ndarray
    advantages: np.ndarray
    reference: np.ndarray | None = None
    old: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.mask[1:].sum())


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """`buckets`: lengths in tokens, ascending. `rows`: rows of a micro-batch. `pad_id`: filler, never a target with
    mask 1.
    """

    buckets: tuple[int, ...]
    rows: int
    pad_id: int

    def bucket(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens. Raises DecodeError if none does."""
        for size in self.buckets:
            if length <= size:
                return size
        raise DecodeError(
            f"a sequence of {length} tokens exceeds the longest bucket, {self.buckets[-1]}",
            "raise trainer.length_buckets",
        )

    def n_micro(self, n_rows: int) -> int:
        return max(1, -(-n_rows // self.rows))


def policy_row(trajectory: Trajectory, trained: WeightVersion) -> Row:
    """An episode, without advantages yet; `trained` is the version of the weights about to be updated."""
    n = len(trajectory.token_ids)
    current = np.zeros(n, np.uint8)
    for span in trajectory.versions:
        current[span.start : span.end] = WeightVersion.parse(span.version).step == trained.step
    return Row(trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, current, np.zeros(n))


def left_out(row: Row) -> Row:
    """The row without a trainable token."""
    return replace(row, mask=np.zeros_like(row.mask))


def supervised_row(ids: Sequence[int], mask: Sequence[int]) -> Row:
    """A demonstration: mask 1 on the tokens to imitate."""
    n = len(ids)
    return Row(
        np.asarray(ids, np.int32),
        np.asarray(mask, np.uint8),
        np.zeros(n, np.float32),
        np.zeros(n, np.uint8),
        np.zeros(n),
    )


def row_weights(rows: Sequence[Row], mode: Aggregation, max_response_length: int) -> np.ndarray:
    """float64 [N]: the weight of every token of a row in the loss of the whole step.

    `sequence-mean-token-scale` (Dr. GRPO) divides by the constant `max_response_length`, in tokens. Rows without a
    trainable token count for nothing.
    """
    tokens = np.array([row.n_tokens for row in rows], np.float64)
    filled = max(1, int((tokens > 0).sum()))
    if mode == "token-mean":
        return np.full(len(rows), 1.0 / max(1.0, tokens.sum()))
    if mode == "sequence-mean-token-mean":
        return 1.0 / (np.maximum(tokens, 1.0) * filled)
    if mode == "sequence-mean-token-scale":
        return np.full(len(rows), 1.0 / (max_response_length * filled))
    return np.full(len(rows), 1.0 / filled)


def micro_batches(rows: Sequence[Row], weights: np.ndarray, layout: BatchLayout, n_micro: int) -> list[Batch]:
    """Packs rows into exactly `n_micro` micro-batches, similar lengths together, empty rows at the end. Raises as
    `arranged`.
    """
    parts = arranged(rows, layout, n_micro)
    has = tuple(name for name in _OPTIONAL if rows and getattr(rows[0], name) is not None)
    return [_assemble([rows[i] for i in part], weights[part], layout, has) for part in parts]


def arranged(rows: Sequence[Row], layout: BatchLayout, n_micro: int) -> list[list[int]]:
    """Which rows are in which micro-batch, in their order.

    Raises DecodeError if a row is longer than the longest bucket or there are more rows than places.
    """
    if len(rows) > n_micro * layout.rows:
        raise DecodeError(
            f"{len(rows)} sequences do not fit into {n_micro} x {layout.rows} rows",
            "groups are larger than num_generations",
        )
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    return [order[i * layout.rows : (i + 1) * layout.rows] for i in range(n_micro)]


def by_row(tables: Sequence[np.ndarray], rows: Sequence[Row], parts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """What was computed of micro-batches, [B, T] each in the places of `targets`, as float32 [T] for each row: at the
    tokens that count, 0 elsewhere.
    """
    made = [np.zeros(len(row.ids), np.float32) for row in rows]
    for table, part in zip(tables, parts, strict=True):
        for i, index in enumerate(part):
            n = len(rows[index].ids)
            made[index][1:] = np.where(rows[index].mask[1:] > 0, table[i, : n - 1], 0.0)
    return made


def _assemble(rows: Sequence[Row], weights: np.ndarray, layout: BatchLayout, has: Sequence[str]) -> Batch:
    shape = (layout.rows, layout.bucket(max((len(row.ids) for row in rows), default=1)))
    ids, targets = np.full(shape, layout.pad_id, np.int32), np.full(shape, layout.pad_id, np.int32)
    mask, behaviour, advantages, current = (np.zeros(shape, np.float32) for _ in range(4))
    row_weight = np.zeros(layout.rows, np.float32)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n], targets[i, : n - 1] = row.ids, row.ids[1:]
        mask[i, : n - 1], current[i, : n - 1] = row.mask[1:], row.current[1:] * row.mask[1:]
        behaviour[i, : n - 1] = np.where(row.mask[1:] > 0, row.behaviour[1:], 0.0)
        advantages[i, : n - 1] = row.advantages[1:]
        row_weight[i] = weights[i]
    return Batch(
        ids,
        targets,
        mask,
        behaviour,
        advantages,
        current,
        row_weight,
        **{name: _table(rows, name, shape) for name in has},
    )


def _table(rows: Sequence[Row], name: str, shape: tuple[int, int]) -> np.ndarray:
    made = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        made[i, : len(row.ids) - 1] = getattr(row, name)[1:]
    return made
