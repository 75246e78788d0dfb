"""Groups to fixed-shape batches of whole sequences: one a row, right-padded, or several (see `packing`).

Invariants:
- position t of `targets`, `mask`, `behaviour`, `advantages` and `current` belongs to the token at t + 1: what the
  hidden state at t predicts;
- a micro-batch has one of few lengths (the buckets), and of each one of few numbers of rows, so compiled shapes are
  bounded;
- `weight` carries the *global* denominators of the step, so losses and gradients of the micro-batches add up to those
  of the whole batch, whatever their token counts, and however the sequences are packed;
- what stands at a position with mask 0 never matters, and is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from services.trainer.batches.packing import MicroBatch, Place, RowShapes, packed
from services.trainer.models.attention import Packing
from shared.errors import DecodeError
from shared.types import Trajectory, WeightVersion

Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows and T positions; a pytree for JAX.

    ids, targets: int32 [B, T]. mask: float32 [B, T], 1 where the target was sampled by the policy.
    behaviour, advantages: float32 [B, T]. current: float32 [B, T], 1 where sampled by the weights now being trained.
    weight: float32 of the token in the loss of the whole step, [B, 1] where a row is one sequence, [B, T] where
    sequences are packed; `packing` says where these lie, and is None of the former. reference, old: float32 [B, T]
    log-probabilities of the reference model and of the policy at the start of the step; values, returns: float32
    [B, T], what the critic expected before the token at the start of the step, and what it should have. None where the
    objective does not need them. routed: int16 or int32 [B, T, L, k], the experts that the engine has sent the token at
    t to in each layer, -1 where they are not known; None where they are of no token of the step. What several sequences
    begin with is packed once only where its experts are the same as well.
    """

    ids: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    current: np.ndarray
    weight: np.ndarray
    packing: Packing | None = None
    reference: np.ndarray | None = None
    old: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    routed: np.ndarray | None = None


_OPTIONAL = ("reference", "old", "values", "returns")
jax.tree_util.register_dataclass(
    Batch,
    data_fields=[
        "ids",
        "targets",
        "mask",
        "behaviour",
        "advantages",
        "current",
        "weight",
        "packing",
        *_OPTIONAL,
        "routed",
    ],
    meta_fields=[],
)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: ids int32 [T], mask [T], behaviour log-probabilities [T], current [T], advantages [T]; and [T] each
    what `Batch` may have, in every row of a step or in none. routed: [n, L, k], of the first n tokens.
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
    routed: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.mask[1:].sum())

    @property
    def own_from(self) -> int:
        """How many tokens from the first on no loss is computed of: of them no token that counts is predicted."""
        counted = np.flatnonzero(self.mask[1:])
        return int(counted[0]) if len(counted) else len(self.ids)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """`buckets`: lengths in tokens, ascending. `rows`: rows of a micro-batch. `pad_id`: filler, never a target with
    mask 1. With `tokens` sequences are packed, into micro-batches of at most so many positions, whose rows divide over
    `shards`, and `rows` is how many there are at most of the longest; without, a row is one sequence.
    """

    buckets: tuple[int, ...]
    rows: int
    pad_id: int
    tokens: int | None = None
    shards: int = 1

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
    t = trajectory
    return Row(t.token_ids, t.loss_mask, t.logprobs, current, np.zeros(n), routed=t.routed_experts)


def left_out(row: Row) -> Row:
    """The row without a trainable token."""
    return replace(row, mask=np.zeros_like(row.mask))


def supervised_row(ids: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray) -> Row:
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
    """The sequences, of which each token has the weight [N] of its own, in micro-batches. Raises as `arranged`."""
    return assembled(rows, weights, arranged(rows, layout, n_micro), layout.pad_id)


def arranged(rows: Sequence[Row], layout: BatchLayout, n_micro: int) -> list[MicroBatch]:
    """Which sequences are in which micro-batch, and where: exactly `n_micro` of one sequence a row, similar lengths
    together and empty rows at the end; or as many packed ones as it takes.

    Raises DecodeError if a sequence is longer than the longest bucket, or if there are more than places for one a row.
    """
    if layout.tokens is not None:
        shapes = RowShapes(layout.buckets, layout.tokens, layout.shards)
        layout.bucket(max((len(row.ids) for row in rows), default=1))
        return packed(_distinct(rows), [row.own_from for row in rows], shapes) if rows else []
    if len(rows) > n_micro * layout.rows:
        raise DecodeError(
            f"{len(rows)} sequences do not fit into {n_micro} x {layout.rows} rows",
            "groups are larger than num_generations",
        )
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    parts = [order[i * layout.rows : (i + 1) * layout.rows] for i in range(n_micro)]
    return [_padded(rows, part, layout) for part in parts]


def _distinct(rows: Sequence[Row]) -> list[np.ndarray]:
    """int32 [n] of each row: equal numbers where tokens and their experts are equal, for only these share a place."""
    if all(row.routed is None for row in rows):
        return [row.ids for row in rows]
    number: dict[bytes, int] = {}

    def numbered(row: Row) -> np.ndarray:
        known = () if row.routed is None else row.routed
        keys = [token.tobytes() + (known[t].tobytes() if t < len(known) else b"") for t, token in enumerate(row.ids)]
        return np.array([number.setdefault(key, len(number)) for key in keys], np.int32)

    return [numbered(row) for row in rows]


def _padded(rows: Sequence[Row], part: Sequence[int], layout: BatchLayout) -> MicroBatch:
    places = [Place(i, row, np.arange(len(rows[i].ids))) for row, i in enumerate(part)]
    length = layout.bucket(max((len(place.columns) for place in places), default=1))
    return MicroBatch((layout.rows, length), tuple(places), packed=False)


def by_row(tables: Sequence[np.ndarray], rows: Sequence[Row], parts: Sequence[MicroBatch]) -> list[np.ndarray]:
    """What was computed of micro-batches, [B, T] each in the places of `targets`, as float32 [T] for each sequence: at
    the tokens that count, 0 elsewhere.
    """
    made = [np.zeros(len(row.ids), np.float32) for row in rows]
    for table, part in zip(tables, parts, strict=True):
        for place in part.places:
            found = table[place.row, place.columns[:-1]]
            made[place.sequence][1:] = np.where(rows[place.sequence].mask[1:] > 0, found, 0.0)
    return made


def efficiency(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """`computed_tokens`: positions of all micro-batches; `packing_efficiency`: the share of them that hold a token."""
    computed = sum(rows * length for rows, length in (part.shape for part in parts))
    return {
        "computed_tokens": float(computed),
        "packing_efficiency": sum(part.n_tokens for part in parts) / computed,
    }


def assembled(rows: Sequence[Row], weights: np.ndarray, parts: Sequence[MicroBatch], pad_id: int) -> list[Batch]:
    """The sequences in their places; each token has its sequence's weight [N]."""
    has = tuple(name for name in _OPTIONAL if rows and getattr(rows[0], name) is not None)
    made = [_assemble(rows, weights, part, pad_id, has) for part in parts]
    like = next((row.routed for row in rows if row.routed is not None), None)
    if like is None:
        return made
    return [replace(batch, routed=_routed(rows, part, like)) for batch, part in zip(made, parts, strict=True)]


def _assemble(rows: Sequence[Row], weights: np.ndarray, part: MicroBatch, pad_id: int, has: Sequence[str]) -> Batch:
    shape = part.shape
    ids, targets = np.full(shape, pad_id, np.int32), np.full(shape, pad_id, np.int32)
    mask, behaviour, advantages, current = (np.zeros(shape, np.float32) for _ in range(4))
    weight = np.zeros(shape if part.packed else (shape[0], 1), np.float32)
    for place in part.places:
        row, at = rows[place.sequence], (place.row, place.columns[:-1])
        ids[place.row, place.columns], targets[at] = row.ids, row.ids[1:]
        mask[at], current[at] = row.mask[1:], row.current[1:] * row.mask[1:]
        behaviour[at] = np.where(row.mask[1:] > 0, row.behaviour[1:], 0.0)
        advantages[at] = row.advantages[1:]
        weight[at if part.packed else place.row] = weights[place.sequence]
    packing = _packing(part) if part.packed else None
    tables = {name: _table(rows, name, part) for name in has}
    return Batch(ids, targets, mask, behaviour, advantages, current, weight, packing, **tables)


def _packing(part: MicroBatch) -> Packing:
    """What fills a row up sees itself."""
    positions, sequences = np.zeros(part.shape, np.int32), np.zeros(part.shape, np.int32)
    visible_until = np.broadcast_to(np.arange(1, part.shape[1] + 1, dtype=np.int32), part.shape).copy()
    for number, place in enumerate(part.places):
        at = (place.row, place.columns)
        positions[at], sequences[at] = np.arange(len(place.columns)), number % part.shape[1]
        visible_until[at] = np.maximum(visible_until[at], place.columns[-1] + 1)
    return Packing(positions, visible_until, sequences)


def _table(rows: Sequence[Row], name: str, part: MicroBatch) -> np.ndarray:
    made = np.zeros(part.shape, np.float32)
    for place in part.places:
        made[place.row, place.columns[:-1]] = getattr(rows[place.sequence], name)[1:]
    return made


def routed_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Of `Batch.routed`, where trajectories have experts of `dtype`: the smallest that also holds -1."""
    return np.result_type(dtype, np.int8)


def _routed(rows: Sequence[Row], part: MicroBatch, like: np.ndarray) -> np.ndarray:
    """[B, T, L, k] of experts `like` [n, L, k]."""
    made = np.full((*part.shape, *like.shape[1:]), -1, routed_dtype(like.dtype))
    for place in part.places:
        known = rows[place.sequence].routed
        if known is not None:
            made[place.row, place.columns[: len(known)]] = known
    return made
