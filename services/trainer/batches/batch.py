"""Fixed-shape batches of whole sequences: one sequence a row, right-padded, or several (see `packing`).

Invariants:
- position t of `targets`, `mask`, `behaviour`, `advantages` and `current` belongs to the token at t + 1, which the
  hidden state at t predicts;
- a micro-batch has one of few lengths (the buckets), and for each length one of few numbers of rows, so the number of
  compiled shapes is bounded;
- `weight` has the *global* denominators of the step, so losses and gradients of micro-batches add up to those of the
  whole batch, for any token counts and any packing;
- values at positions with mask 0 do not affect the result, and are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import jax
import numpy as np

from services.trainer.batches.branching import TreeRow, tree_keys
from services.trainer.batches.packing import MicroBatch, RowShapes, SequencePlace, packed
from services.trainer.models.attention import Packing
from shared.errors import DecodeError
from shared.types import EpisodeSequence, Trajectory, WeightVersion

Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows and T positions; a pytree for JAX.

    ids, targets: int32 [B, T].
    mask: float32 [B, T], 1 where the policy sampled the target.
    behaviour, advantages: float32 [B, T].
    current: float32 [B, T], 1 where the weights now being trained sampled the target.
    weight: float32, the token's weight in the loss of the whole step; [B, 1] if a row is one sequence, [B, T] if
        sequences are packed.
    packing: places of the packed sequences; None if a row is one sequence.
    reference, old: float32 [B, T], log-probabilities of the reference and of the policy at the start of the step.
    values, returns: float32 [B, T], the critic's value before the token at the start of the step, and its target.
    observed: float32 [B, T], weights of the environment's tokens, which add up to 1 over the step; 0 elsewhere.
    staleness: float32 [B, T], steps between the weights that sampled the token and those before this step; 0 elsewhere.
    routed: int16 or int32 [B, T, L, k], the experts to which the engine sent the token at t in each layer, -1 if not
        known. Sequences share a packed prefix only if its experts are the same too.

    The optional arrays are None if the objective does not need them; `routed` if no token of the step has experts.
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
    observed: np.ndarray | None = None
    staleness: np.ndarray | None = None
    routed: np.ndarray | None = None


_OPTIONAL = ("reference", "old", "values", "returns", "observed", "staleness")
jax.tree_util.register_dataclass(Batch, data_fields=[field.name for field in fields(Batch)], meta_fields=[])


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: arrays [T] as in `Batch`, ids int32.

    Optional arrays are in every row of a step or in none; `routed` is [n, L, k], of the first n tokens. The first
    `shared` tokens belong to the row `parent` places before this one (0: to none), and are masked here.
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
    observed: np.ndarray | None = None
    staleness: np.ndarray | None = None
    routed: np.ndarray | None = None
    parent: int = 0
    shared: int = 0

    @property
    def n_tokens(self) -> int:
        return int(self.mask[1:].sum())

    @property
    def predicted(self) -> np.ndarray:
        """Bool [T]: true for tokens whose prediction is in the loss, sampled ones and observed ones."""
        return self.mask > 0 if self.observed is None else (self.mask > 0) | (self.observed > 0)

    @property
    def own_from(self) -> int:
        """Number of leading tokens that predict no token of the loss."""
        counted = np.flatnonzero(self.predicted[1:])
        return int(counted[0]) if len(counted) else len(self.ids)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Shapes of micro-batches.

    `buckets` are lengths in tokens, ascending; `rows` is the number of rows; `pad_id` fills positions, never a target
    with mask 1. With `tokens`, sequences are packed into micro-batches of at most so many positions, whose rows divide
    over `shards`, and `rows` is the most rows of the longest length; otherwise a row is one sequence.
    """

    buckets: tuple[int, ...]
    rows: int
    pad_id: int
    tokens: int | None = None
    shards: int = 1

    def bucket(self, length: int) -> int:
        """Return the smallest bucket that holds `length` tokens. Raises DecodeError if none does."""
        for size in self.buckets:
            if length <= size:
                return size
        raise DecodeError(
            f"a sequence of {length} tokens exceeds the longest bucket, {self.buckets[-1]}",
            "raise trainer.length_buckets",
        )

    @property
    def has_one_shape(self) -> bool:
        """True if all micro-batches have the same shape."""
        return len(self.buckets) == 1 and (self.tokens is None or self.rows == self.shards)

    def n_micro(self, n_rows: int) -> int:
        return max(1, -(-n_rows // self.rows))


def policy_rows(trajectory: Trajectory, trained: WeightVersion) -> list[Row]:
    """Make a row of each sequence of an episode, without advantages; `trained` is the present version."""
    return [_policy_row(one, number, trained) for number, one in enumerate(trajectory.sequences())]


def with_staleness(rows: Sequence[Row], trajectory: Trajectory, trained: WeightVersion) -> list[Row]:
    """Add to the rows of an episode the staleness of their tokens; `trained` is the present version."""
    made = list[Row]()
    for row, one in zip(rows, trajectory.sequences(), strict=True):
        staleness = np.zeros(len(row.ids), np.float32)
        for span in one.versions:
            staleness[span.start : span.end] = max(0, trained.step - WeightVersion.parse(span.version).step)
        made.append(replace(row, staleness=staleness))
    return made


def with_observations(rows: Sequence[Row]) -> list[Row]:
    """Mark the tokens that the environment wrote after the first sampled token of each of an episode's sequences.

    `observed` becomes 1 there, at own tokens of the row.
    """
    made, firsts = list[Row](), list[int]()
    for number, row in enumerate(rows):
        before = firsts[number - row.parent] if row.parent else len(row.ids)
        own = np.flatnonzero(row.mask)
        first = min(before if before < row.shared else len(row.ids), int(own[0]) if len(own) else len(row.ids))
        places = np.arange(len(row.ids))
        observed = (places > first) & (places >= row.shared) & (row.mask == 0)
        made.append(replace(row, observed=observed.astype(np.float32)))
        firsts.append(first)
    return made


def weigh_observations(rows: Sequence[Row]) -> list[Row]:
    """Divide `observed` by the number of the step's observed tokens that something predicts."""
    n = sum(float(row.observed[1:].sum()) for row in rows if row.observed is not None)
    return [row if row.observed is None else replace(row, observed=row.observed / max(1.0, n)) for row in rows]


def _policy_row(one: EpisodeSequence, number: int, trained: WeightVersion) -> Row:
    n = len(one.token_ids)
    current = np.zeros(n, np.uint8)
    for span in one.versions:
        current[span.start : span.end] = WeightVersion.parse(span.version).step == trained.step
    parent = number - one.parent if one.shared else 0
    arrays = one.token_ids, one.loss_mask, one.logprobs, current, np.zeros(n)
    return Row(*arrays, routed=one.routed_experts, parent=parent, shared=one.shared)


def stored(rows: Sequence[Row], name: str) -> np.ndarray | None:
    """Join an array of the rows of one episode, without what they share: [N], as `Trajectory.stored`."""
    found = [(getattr(row, name), row.shared) for row in rows]
    made = [values[shared:] for values, shared in found if values is not None]
    return (made[0] if len(made) == 1 else np.concatenate(made)) if made else None


def by_sequence(values: np.ndarray, rows: Sequence[Row]) -> list[np.ndarray]:
    """Split an array [N] of an episode's stored tokens into one [T] for each row, 0 at shared tokens."""
    if len(rows) == 1:
        return [values]
    ends = np.cumsum([len(row.ids) - row.shared for row in rows])[:-1]
    parts = np.split(values, ends)
    return [np.concatenate([np.zeros(row.shared), part]) for row, part in zip(rows, parts, strict=True)]


def left_out(row: Row) -> Row:
    """Mask all tokens of a row."""
    none = None if row.observed is None else np.zeros_like(row.observed)
    return replace(row, mask=np.zeros_like(row.mask), observed=none)


def supervised_row(ids: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray) -> Row:
    """Make the row of a demonstration: mask 1 on the tokens to imitate."""
    n = len(ids)
    return Row(
        np.asarray(ids, np.int32),
        np.asarray(mask, np.uint8),
        np.zeros(n, np.float32),
        np.zeros(n, np.uint8),
        np.zeros(n),
    )


def row_weights(
    rows: Sequence[Row], mode: Aggregation, max_response_length: int, episodes: Sequence[int] | None = None
) -> np.ndarray:
    """Compute float64 [N]: the weight of each row's tokens in the loss of the whole step.

    The modes by sequence count an episode, with all its rows, as one: `episodes` has each row's episode, numbered from
    0; None: each row is one. `sequence-mean-token-scale` (Dr. GRPO) divides by the constant `max_response_length`, in
    tokens. Episodes without trainable tokens are not counted.
    """
    tokens = np.array([row.n_tokens for row in rows], np.float64)
    if mode == "token-mean":
        return np.full(len(rows), 1.0 / max(1.0, tokens.sum()))
    of_episode = tokens if episodes is None else np.bincount(episodes, tokens)
    filled = max(1, int((of_episode > 0).sum()))
    tokens = tokens if episodes is None else of_episode[list(episodes)]
    if mode == "sequence-mean-token-mean":
        return 1.0 / (np.maximum(tokens, 1.0) * filled)
    if mode == "sequence-mean-token-scale":
        return np.full(len(rows), 1.0 / (max_response_length * filled))
    return np.full(len(rows), 1.0 / filled)


def micro_batches(rows: Sequence[Row], weights: np.ndarray, layout: BatchLayout, n_micro: int) -> list[Batch]:
    """Make micro-batches of the sequences; `weights` [N] are those of their tokens. Raises as `arranged`."""
    return assembled(rows, weights, arranged(rows, layout, n_micro), layout.pad_id)


def arranged(rows: Sequence[Row], layout: BatchLayout, n_micro: int) -> list[MicroBatch]:
    """Assign the sequences to micro-batches and places.

    Without packing, exactly `n_micro` micro-batches, similar lengths together, empty rows at the end; packed, as many
    as needed.

    Raises DecodeError if a sequence is longer than the longest bucket, or if unpacked rows do not hold all sequences.
    """
    if layout.tokens is not None:
        shapes = RowShapes(layout.buckets, layout.tokens, layout.shards)
        layout.bucket(max((len(row.ids) for row in rows), default=1))
        return packed(*_prefix_keys(rows), shapes) if rows else []
    if len(rows) > n_micro * layout.rows:
        raise DecodeError(
            f"{len(rows)} sequences do not fit into {n_micro} x {layout.rows} rows",
            "check that groups have at most num_generations episodes",
        )
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    parts = [order[i * layout.rows : (i + 1) * layout.rows] for i in range(n_micro)]
    return [_padded(rows, part, layout) for part in parts]


def _prefix_keys(rows: Sequence[Row]) -> tuple[list[np.ndarray], list[int]]:
    """Return each row's tokens as numbers, and how many of the first may share a place with equal ones."""
    numbers, own_from = _distinct(rows), [row.own_from for row in rows]
    if not any(row.parent for row in rows):
        return numbers, own_from
    parents = [i - row.parent if row.parent else None for i, row in enumerate(rows)]
    return tree_keys(
        [
            TreeRow(ids, row.predicted, parent, row.shared, own)
            for ids, row, parent, own in zip(numbers, rows, parents, own_from, strict=True)
        ]
    )


def _distinct(rows: Sequence[Row]) -> list[np.ndarray]:
    """Number the tokens of each row, int32 [n]: equal numbers for equal tokens and experts, which may share a place."""
    if all(row.routed is None for row in rows):
        return [row.ids for row in rows]
    number: dict[bytes, int] = {}

    def numbered(row: Row) -> np.ndarray:
        known = () if row.routed is None else row.routed
        keys = [token.tobytes() + (known[t].tobytes() if t < len(known) else b"") for t, token in enumerate(row.ids)]
        return np.array([number.setdefault(key, len(number)) for key in keys], np.int32)

    return [numbered(row) for row in rows]


def _padded(rows: Sequence[Row], part: Sequence[int], layout: BatchLayout) -> MicroBatch:
    places = [SequencePlace(i, row, np.arange(len(rows[i].ids))) for row, i in enumerate(part)]
    length = layout.bucket(max((len(place.columns) for place in places), default=1))
    return MicroBatch((layout.rows, length), tuple(places), packed=False)


def by_row(tables: Sequence[np.ndarray], rows: Sequence[Row], parts: Sequence[MicroBatch]) -> list[np.ndarray]:
    """Convert tables [B, T] of micro-batches, aligned with `targets`, to float32 [T] for each sequence; masked: 0."""
    made = [np.zeros(len(row.ids), np.float32) for row in rows]
    for table, part in zip(tables, parts, strict=True):
        for place in part.places:
            found = table[place.row, place.columns[:-1]]
            made[place.sequence][1:] = np.where(rows[place.sequence].mask[1:] > 0, found, 0.0)
    return made


def efficiency(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Measure `computed_tokens`, all positions, and `packing_efficiency`, the share of them that hold a token."""
    computed = sum(rows * length for rows, length in (part.shape for part in parts))
    return {
        "computed_tokens": float(computed),
        "packing_efficiency": sum(part.n_tokens for part in parts) / computed,
    }


def assembled(rows: Sequence[Row], weights: np.ndarray, parts: Sequence[MicroBatch], pad_id: int) -> list[Batch]:
    """Fill micro-batches with the sequences in their places; each token has its sequence's weight [N]."""
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
    taken = np.zeros(shape, bool)
    weight = np.zeros(shape if part.packed else (shape[0], 1), np.float32)
    for place in part.places:
        row = rows[place.sequence]
        t, at = _predicted(row, place, taken)
        ids[place.row, place.columns], targets[at] = row.ids, row.ids[t]
        mask[at], current[at] = row.mask[t], row.current[t] * row.mask[t]
        behaviour[at] = np.where(row.mask[t] > 0, row.behaviour[t], 0.0)
        advantages[at] = row.advantages[t]
        weight[at if part.packed else place.row] = weights[place.sequence]
    packing = _packing(rows, part) if part.packed else None
    tables = {name: _table(rows, name, part) for name in has}
    return Batch(ids, targets, mask, behaviour, advantages, current, weight, packing, **tables)


def _predicted(row: Row, place: SequencePlace, taken: np.ndarray) -> tuple[np.ndarray, tuple[int, np.ndarray]]:
    """Return the tokens t >= 1 that this row writes, and the places of their predictions.

    A place that rows share predicts at most one token of the loss: no other row overwrites it. `taken`, bool [B, T], is
    true at places that predict one, and is brought up to date.
    """
    columns, of_loss = place.columns[:-1], row.predicted[1:]
    writes = of_loss | ~taken[place.row, columns]
    taken[place.row, columns] |= of_loss
    return 1 + np.flatnonzero(writes), (place.row, columns[writes])


def _packing(rows: Sequence[Row], part: MicroBatch) -> Packing:
    """Describe the packing for attention; filler positions attend to themselves."""
    positions, sequences = np.zeros(part.shape, np.int32), np.zeros(part.shape, np.int32)
    visible_until = np.broadcast_to(np.arange(1, part.shape[1] + 1, dtype=np.int32), part.shape).copy()
    taken = np.zeros(part.shape, bool)
    for number, place in enumerate(part.places):
        _, predicted = _predicted(rows[place.sequence], place, taken)
        sequences[predicted] = number % part.shape[1]
        at = (place.row, place.columns)
        positions[at] = np.arange(len(place.columns))
        visible_until[at] = np.maximum(visible_until[at], place.columns[-1] + 1)
    return Packing(positions, visible_until, sequences)


def _table(rows: Sequence[Row], name: str, part: MicroBatch) -> np.ndarray:
    made, taken = np.zeros(part.shape, np.float32), np.zeros(part.shape, bool)
    for place in part.places:
        row = rows[place.sequence]
        t, at = _predicted(row, place, taken)
        made[at] = getattr(row, name)[t]
    return made


def routed_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Smallest dtype of `Batch.routed` that holds experts of `dtype` and -1."""
    return np.result_type(dtype, np.int8)


def _routed(rows: Sequence[Row], part: MicroBatch, like: np.ndarray) -> np.ndarray:
    """Make the table [B, T, L, k] of experts; `like` [n, L, k] gives shape and dtype."""
    made = np.full((*part.shape, *like.shape[1:]), -1, routed_dtype(like.dtype))
    for place in part.places:
        known = rows[place.sequence].routed
        if known is not None:
            made[place.row, place.columns[: len(known)]] = known
    return made
