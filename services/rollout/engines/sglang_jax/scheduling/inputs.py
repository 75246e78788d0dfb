"""Inputs of one step as one int32 array: one transfer to the device instead of one for each of fifteen arrays.

The host concatenates the arrays; the compiled step cuts them apart again. Floats and seeds travel as their bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch

_OF_BATCH = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "cache_loc",
    "seq_lens",
    "req_pool_indices",
    "extend_prefix_lens",
    "extend_seq_lens",
    "logits_indices",
)


class SamplingRows:
    """Sampling parameters of the requests of one batch, one row each, padded with greedy rows.

    `with_top`: whether a row wants the most likely tokens. `biases` and `masks` hold the constraints of rows that have
    some.
    """

    def __init__(self, size: int) -> None:
        self.with_top = False
        self.biases: dict[int, dict[int, float]] = {}
        self.masks: dict[int, np.ndarray] = {}
        self.temperature_B = np.zeros(size, np.float32)
        self.top_p_B = np.ones(size, np.float32)
        self.min_p_B = np.zeros(size, np.float32)
        self.top_k_B = np.full(size, np.iinfo(np.int32).max, np.int32)
        self.seed_B2 = np.zeros((size, 2), np.uint32)
        self.index_B = np.zeros(size, np.int32)
        self.forced_B = np.full(size, -1, np.int32)

    def guide(self, row: int, biases: dict[int, float], mask: np.ndarray | None) -> None:
        """Constrain the token of a row: `mask` is uint32[words], one bit for each token that is allowed."""
        if biases:
            self.biases[row] = biases
        if mask is not None:
            self.masks[row] = mask


class Layout(NamedTuple):
    """Static part of a step's inputs: `parts` are the names and lengths of the arrays in the order of the packed one.

    A step is compiled once for each layout. `n_top`: how many of the most likely tokens it returns.
    """

    forward_mode: Any
    capture_hidden_mode: Any
    spec_algorithm: Any
    n_requests: int
    n_top: int
    parts: tuple[tuple[str, int], ...]


def pack(batch: ModelWorkerBatch, rows: SamplingRows, n_top: int) -> tuple[np.ndarray, Layout]:
    """Return all arrays of the batch and its rows as one new int32 array, and its layout."""
    arrays = {name: getattr(batch, name) for name in _OF_BATCH} | {
        "temperature": rows.temperature_B.view(np.int32),
        "top_p": rows.top_p_B.view(np.int32),
        "min_p": rows.min_p_B.view(np.int32),
        "top_k": rows.top_k_B,
        "seed": rows.seed_B2.view(np.int32).ravel(),
        "index": rows.index_B,
        "forced": rows.forced_B,
        **_guides(rows),
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    layout = Layout(
        batch.forward_mode,
        batch.capture_hidden_mode,
        batch.spec_algorithm,
        len(batch.seq_lens),
        n_top,
        tuple((name, len(array)) for name, array in arrays.items()),
    )
    return np.concatenate(list(arrays.values()), dtype=np.int32, casting="same_kind"), layout


def blank(layout: Layout) -> np.ndarray:
    """Return a packed array without requests, whose step writes no keys and values."""
    arrays = [np.full(n, -1 if name == "out_cache_loc" else 0, np.int32) for name, n in layout.parts]
    return np.concatenate(arrays)


def _guides(rows: SamplingRows) -> dict[str, np.ndarray]:
    """Return the rows' constraints as padded arrays, each only if a row needs it."""
    n, arrays = len(rows.forced_B), dict[str, np.ndarray]()
    if rows.biases:
        most = max(map(len, rows.biases.values()))
        width = next(size for size in (16 * 4**i for i in range(16)) if size >= most)
        ids, values = np.zeros((n, width), np.int32), np.zeros((n, width), np.float32)
        for row, biases in rows.biases.items():
            ids[row, : len(biases)], values[row, : len(biases)] = list(biases), list(biases.values())
        arrays |= {"bias_ids": ids.ravel(), "bias": values.view(np.int32).ravel()}
    if rows.masks:
        masks = np.full((n, max(map(len, rows.masks.values()))), 0xFFFFFFFF, np.uint32)
        for row, mask in rows.masks.items():
            masks[row] = mask
        arrays["mask"] = masks.view(np.int32).ravel()
    return arrays


def unpack(packed: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """Cut the arrays of `pack` apart, with their own dtypes and shapes.

    The order of operations is fixed: it is part of the key under which a compiled step is cached between processes.
    """
    arrays, at = dict[str, jax.Array](), 0
    for name, n in layout.parts:
        arrays[name] = jax.lax.slice_in_dim(packed, at, at + n)
        at += n
    for name in sorted(arrays.keys() & {"temperature", "top_p", "min_p", "bias"}):
        arrays[name] = jax.lax.bitcast_convert_type(arrays[name], jnp.float32)
    for name in sorted(arrays.keys() & {"seed", "mask"}):
        arrays[name] = jax.lax.bitcast_convert_type(arrays[name], jnp.uint32)
    for name in sorted(arrays.keys() & {"seed", "bias_ids", "bias", "mask"}):
        arrays[name] = arrays[name].reshape(len(arrays["forced"]), -1)
    return arrays


def batch_of(
    arrays: dict[str, jax.Array], layout: Layout, attention: Any, experts: Any
) -> tuple[ForwardBatch, LogitsMetadata]:
    """Build the model's arguments from unpacked arrays, its attention and the places of its experts."""
    named: dict[str, Any] = {name: arrays.get(name) for name in _OF_BATCH if name != "logits_indices"}
    batch = ForwardBatch(
        bid=0,
        forward_mode=layout.forward_mode,
        batch_size=layout.n_requests,
        spec_algorithm=layout.spec_algorithm,
        capture_hidden_mode=layout.capture_hidden_mode,
        attn_backend=attention,
        expert_location_metadata=experts,
        **named,
    )
    metadata = LogitsMetadata(
        forward_mode=layout.forward_mode,
        capture_hidden_mode=layout.capture_hidden_mode,
        extend_seq_lens=arrays.get("extend_seq_lens"),
        logits_indices=arrays.get("logits_indices"),
    )
    return batch, metadata
