"""Batches of a client's datums: checked, padded to few shapes, in an order that depends on the datums alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import InputError
from volley_tinker.server.messages import Datum, PassRequest
from volley_tinker.server.token_losses import ARRAYS, LOSSES, TokenBatch

_SHORTEST = 32
_FIELDS: Mapping[str, str] = {
    "weights": "weights",
    "logprobs": "behaviour",
    "advantages": "advantages",
    "clip_low_threshold": "low",
    "clip_high_threshold": "high",
}
"""Array of a batch for each input of a loss."""
_REFUSED = {
    "gspo": "its ratio is of whole sequences",
    "stable_reinforce": "it needs records of sampling that are not kept here",
    "custom": "losses are not uploaded; forward_backward_custom of the SDK computes them in the client",
}


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """`context` is the longest sequence; a batch has at most `tokens` positions, or one row, and a multiple of
    `shards` rows."""

    context: int
    vocab_size: int
    pad_id: int
    tokens: int = 4096
    shards: int = 1

    def length(self, n: int) -> int:
        size = _SHORTEST
        while size < n:
            size *= 2
        return min(size, max(n, self.context))

    def rows(self, n: int, length: int) -> int:
        """Round a number of rows up to one of few."""
        size = self.shards
        while size < min(n, self.most(length)):
            size *= 2
        return size

    def most(self, length: int) -> int:
        """Return the most rows of a batch: a power of two times the shards."""
        most = self.shards
        while 2 * most * length <= self.tokens:
            most *= 2
        return most


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """Column `column` of datum `datum`."""

    datum: int
    column: int
    ids: np.ndarray
    targets: np.ndarray
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """A batch, and the datum and column of each of its rows."""

    batch: TokenBatch
    rows: Sequence[tuple[int, int]]


def check(request: PassRequest, shapes: BatchShapes) -> None:
    """Raise InputError naming the datum and the input that the loss cannot use."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        reason = _REFUSED.get(request.loss)
        raise InputError(
            f"loss_fn {request.loss[:40]!r} is not supported" + (f": {reason}" if reason else ""),
            f"one of {', '.join(LOSSES)}",
        )
    for name, value in request.config.items():
        if name not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise InputError(f"loss_fn_config.{name[:40]} is no setting of {request.loss}", f"it has {known}")
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise InputError(f"loss_fn_config.{name} must be a number")
    if not request.data:
        raise InputError("the request has no data")
    for i, datum in enumerate(request.data):
        _check_datum(f"datum {i}", datum, loss.inputs, shapes)


def _check_datum(what: str, datum: Datum, inputs: Mapping[str, Any], shapes: BatchShapes) -> None:
    n = len(datum.ids)
    if not 0 < n <= shapes.context:
        raise InputError(f"{what} has {n} tokens, 1 to {shapes.context} are taken")
    targets = datum.inputs.get("target_tokens")
    if targets is None or targets.dtype.kind != "i" or targets.shape[:1] != (n,) or not targets.size:
        raise InputError(f"{what}: target_tokens must be integers, one (or K) for each of its {n} tokens")
    for name, ids in (("model_input", datum.ids), ("target_tokens", targets)):
        if ids.size and not (ids.min() >= 0 and ids.max() < shapes.vocab_size):
            raise InputError(f"{what}: {name} has an id outside the vocabulary of {shapes.vocab_size}")
    for name, value in datum.inputs.items():
        if name == "target_tokens":
            continue
        if name not in inputs:
            raise InputError(f"{what}: {name[:40]} is no input of this loss", f"it has {', '.join(inputs)}")
        if value.shape not in (targets.shape, (n,)) or not np.isfinite(value).all():
            raise InputError(f"{what}: {name} must be {list(targets.shape)} finite numbers, as target_tokens")
    for name, default in inputs.items():
        if default is None and name not in datum.inputs:
            raise InputError(f"{what}: {name} is missing, which this loss needs")


def batches(request: PassRequest, shapes: BatchShapes) -> Iterator[PlacedBatch]:
    """Make the batches of a checked request: similar lengths together, the longest first."""
    loss = LOSSES[request.loss]
    defaults = {name: request.config.get(name, default) for name, default in loss.inputs.items()}
    rows = [row for i, datum in enumerate(request.data) for row in _rows(i, datum, defaults)]
    rows.sort(key=lambda row: (-len(row.ids), row.datum, row.column))
    beta = np.float32(request.config.get("beta", loss.settings.get("beta", 0.0)))
    while rows:
        length = shapes.length(len(rows[0].ids))
        part, rows = rows[: shapes.most(length)], rows[shapes.most(length) :]
        yield _placed(part, shapes.rows(len(part), length), length, shapes.pad_id, beta)


def _rows(i: int, datum: Datum, defaults: Mapping[str, Any]) -> Iterator[_Row]:
    targets = datum.inputs["target_tokens"]
    columns = targets.reshape(len(datum.ids), -1)
    for k in range(columns.shape[1]):
        arrays = {}
        for name, default in defaults.items():
            given = datum.inputs.get(name)
            value = np.full(len(datum.ids), default, np.float32) if given is None else given
            arrays[_FIELDS[name]] = value if value.ndim == 1 else value[:, k]
        if not k or columns[:, k].any() or arrays["weights"].any():  # other columns hold padding alone
            yield _Row(i, k, datum.ids, columns[:, k], arrays)


def _placed(part: Sequence[_Row], n: int, length: int, pad_id: int, beta: np.float32) -> PlacedBatch:
    ids, targets = np.full((n, length), pad_id, np.int32), np.full((n, length), pad_id, np.int32)
    arrays = {name: np.zeros((n, length), np.float32) for name in ARRAYS}
    for at, row in enumerate(part):
        end = len(row.ids)
        ids[at, :end], targets[at, :end] = row.ids, row.targets
        for name, value in row.arrays.items():
            arrays[name][at, :end] = value
    return PlacedBatch(
        TokenBatch(ids, targets, **arrays, beta=np.full((n, 1), beta)), [(row.datum, row.column) for row in part]
    )


def gathered(request: PassRequest, tables: Sequence[tuple[PlacedBatch, np.ndarray]]) -> list[np.ndarray]:
    """Convert tables float32 [B, T] of the batches to one array [T] or [T, K] for each datum."""
    made = [np.zeros(one.inputs["target_tokens"].shape, np.float32) for one in request.data]
    for placed, table in tables:
        for at, (datum, column) in enumerate(placed.rows):
            whole = made[datum].reshape(len(made[datum]), -1)
            whole[:, column] = table[at, : len(whole)]
    return made
