"""Attention for GPUs: one Triton kernel for prefill and decode.

Each program of the kernel takes a block of one request's queries and one key/value head, with all query heads that
share it, and visits the request's keys with the running softmax of FlashAttention (Dao et al., 2022). A table made
before says which queries and keys a program has. A decode of few requests would leave most of the GPU idle, so several
programs share the keys of a request there (Flash-Decoding: Dao et al., 2023).

Matrix products take operands of the pool's dtype and accumulate float32. Those of float32 operands are float32, not
TF32. The layout of the inputs is that of `scheduling.attention`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from services.rollout.engines.sglang_jax.scheduling.attention import BlockAttention

_UNSEEN = -1e30
_PROGRAMS = 264
"""Programs that keep a large GPU busy: two for each of the 132 processors of an H100."""
_MOST_PARTS = 16


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Sizes of a program, all powers of two.

    Args:
        rows: pairs of a query and a head.
        keys: keys visited at once.
        width: head size, rounded up.
    """

    rows: int
    keys: int
    width: int
    warps: int

    @classmethod
    def of(cls, dim: int, group: int, dtype: Any, *, decode: bool) -> _Tiles:
        """Choose sizes that fit into a processor's registers and shared memory. Dot products need 16 of each."""
        width = max(16, pl.next_power_of_2(dim))
        is_float32 = jnp.dtype(dtype) == jnp.float32
        budget = 4096 if is_float32 else 16384
        rows = 16 if decode else min(32 if is_float32 else 128, budget // width)
        rows = max(16, rows, pl.next_power_of_2(group))
        keys = max(16, min(32 if is_float32 else 64, budget // 2 // width))
        return cls(rows, keys, width, 8 if rows * width > 8192 else 4)


def attend(
    q: jax.Array,
    rows: jax.Array,
    cache_loc: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    *,
    kv_heads: int,
    scale: float,
    decode: bool,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of the last `query_lens[b]` of `seq_lens[b]` tokens of each request, as `attend_blocks`.

    Args:
        q: [T, H, D], the queries of all requests one after another; T is padded.
        rows: [slots * 2 K, at least D], for each slot the key and the value of each head in turn; floats.
        cache_loc: int32[C], the slots of all tokens of all requests one after another.
        seq_lens, query_lens: int32[B]; 0 for padding, which comes last.
        scale: factor on the scores.
        decode: no request has more than one query.
        window: how many tokens one sees, itself among them; None: all before it.
        softcap: c, where scores x are c · tanh(x / c).
        interpret: run the kernel as plain JAX, on any device.
    Returns: [T, H, D] in q's dtype; rows of padding are 0.
    """
    tokens, heads, dim = q.shape
    group = heads // kv_heads
    tiles = _Tiles.of(dim, group, rows.dtype, decode=decode)
    plan = _plan(seq_lens, query_lens, tokens, 1 if decode else tiles.rows // group)
    parts = 1
    if decode:
        parts = min(_MOST_PARTS, pl.next_power_of_2(-(-_PROGRAMS // max(tokens * kv_heads, 1))))
    kernel = partial(
        _one_block, tiles=tiles, heads=heads, kv_heads=kv_heads, dim=dim, scale=scale, window=window, softcap=softcap
    )
    shapes = [jax.ShapeDtypeStruct((parts, tokens * heads, dim), q.dtype if parts == 1 else jnp.float32)]
    if parts > 1:
        shapes.append(jax.ShapeDtypeStruct((parts, tokens * heads), jnp.float32))
    out, *sums = pl.pallas_call(
        kernel,
        grid=(len(plan), kv_heads, parts),
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(plan, q.astype(rows.dtype).reshape(tokens * heads, dim), rows, cache_loc)
    return (_joined(out, *sums) if parts > 1 else out[0]).astype(q.dtype).reshape(q.shape)


def _plan(seq_lens: jax.Array, query_lens: jax.Array, tokens: int, block: int) -> jax.Array:
    """Return int32[blocks, 4]: first query, number of queries, first key in `cache_loc`, position of the first query.

    Tokens of padding are one more request, at negative positions, so they see no keys. Blocks that are left over have
    no queries.
    """
    lens = jnp.append(query_lens, tokens - query_lens.sum())
    firsts = jnp.append(seq_lens - query_lens, -tokens)
    key_starts = jnp.append(jnp.cumsum(seq_lens) - seq_lens, 0)
    blocks = (lens + block - 1) // block
    ends = jnp.cumsum(blocks)
    index = jnp.arange((tokens + len(lens) * (block - 1)) // block)
    request = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), len(lens) - 1)
    done = (index - (ends - blocks)[request]) * block
    columns = (
        (jnp.cumsum(lens) - lens)[request] + done,
        jnp.clip(lens[request] - done, 0, block),
        key_starts[request],
        firsts[request] + done,
    )
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _one_block(
    plan_ref: Any,
    q_ref: Any,
    rows_ref: Any,
    slots_ref: Any,
    out_ref: Any,
    *sums_ref: Any,
    tiles: _Tiles,
    heads: int,
    kv_heads: int,
    dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Attend with one block of queries to one part of its keys. Row r is query r // G, head r % G of the group."""
    block, head, part = (pl.program_id(axis) for axis in range(3))
    start, n_queries, key_start, first = (plan_ref[block, column] for column in range(4))
    group = heads // kv_heads
    row = jnp.arange(tiles.rows)
    query = jax.lax.div(row, group)
    at_row = (start + query) * heads + head * group + jax.lax.rem(row, group)
    is_query = query < n_queries
    columns = jnp.arange(tiles.width)
    stored = is_query[:, None] & (columns < dim)[None, :]
    q = triton.load(q_ref.at[at_row[:, None], columns[None, :]], mask=stored, other=0)
    n_keys = jnp.where(n_queries > 0, first + n_queries, 0)
    bounds = _visited(first, n_keys, part, out_ref.shape[0], tiles.keys, window)
    visit = partial(
        _visit, q, rows_ref, slots_ref, key_start, n_keys, first + query, head, columns,
        tiles=tiles, kv_heads=kv_heads, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
    empty = (
        jnp.full((tiles.rows,), _UNSEEN, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
        jnp.zeros((tiles.rows, tiles.width), jnp.float32),
    )
    top, total, mixed = jax.lax.fori_loop(*bounds, visit, empty)
    out = mixed / jnp.maximum(total, 1e-30)[:, None]
    triton.store(out_ref.at[part, at_row[:, None], columns[None, :]], out.astype(out_ref.dtype), mask=stored)
    for ref in sums_ref:
        triton.store(ref.at[part, at_row], top + jnp.log(jnp.maximum(total, 1e-30)) / math.log(2), mask=is_query)


def _visited(
    first: jax.Array, n_keys: jax.Array, part: jax.Array, parts: int, block: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return the first block of keys that a part visits, and the one after its last."""
    oldest = jnp.int32(0) if window is None else jax.lax.div(jnp.maximum(first - window + 1, 0), block)
    end = jax.lax.div(jnp.maximum(n_keys, 0) + block - 1, block)
    if parts == 1:
        return oldest, end
    each = jax.lax.div(jnp.maximum(end - oldest, 0) + parts - 1, parts)
    return oldest + part * each, jnp.minimum(oldest + (part + 1) * each, end)


def _visit(
    q: jax.Array,
    rows_ref: Any,
    slots_ref: Any,
    key_start: jax.Array,
    n_keys: jax.Array,
    positions: jax.Array,
    head: jax.Array,
    columns: jax.Array,
    i: jax.Array,
    state: tuple[jax.Array, jax.Array, jax.Array],
    *,
    tiles: _Tiles,
    kv_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add block `i` of the keys to the running maximum, sum and mixture of values; scores are in powers of two.

    A row without a visible key so far mixes values with weight 1, and its first visible key fades them to 0.
    """
    top, total, mixed = state
    at = i * tiles.keys + jnp.arange(tiles.keys)
    exists = at < n_keys
    slot = triton.load(slots_ref.at[key_start + at], mask=exists, other=0)
    at_row = (slot * (2 * kv_heads) + 2 * head)[:, None]
    held = exists[:, None]
    if tiles.width > rows_ref.shape[1]:
        held = held & (columns < rows_ref.shape[1])[None, :]
    k = triton.load(rows_ref.at[at_row, columns[None, :]], mask=held, other=0)
    v = triton.load(rows_ref.at[at_row + 1, columns[None, :]], mask=held, other=0)
    product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    if q.dtype == jnp.float32:
        product = partial(product, precision=jax.lax.Precision.HIGHEST)
    scores = product(q, k, (((1,), (1,)), ((), ()))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    ago = positions[:, None] - at[None, :]
    visible = ago >= 0 if window is None else (ago >= 0) & (ago < window)
    scores = jnp.where(visible, scores * math.log2(math.e), _UNSEEN)
    new_top = jnp.maximum(top, scores.max(axis=1))
    weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
    mixed = mixed * fade[:, None] + product(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    return new_top, total * fade + weights.sum(axis=1), mixed


def _joined(out: jax.Array, sums: jax.Array) -> jax.Array:
    """Join the parts [P, T * H, D] of the keys by the logarithms of their sums of weights [P, T * H], to base 2."""
    weights = jnp.exp2(sums - sums.max(axis=0))
    return (out * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[:, None]


class GpuAttention(BlockAttention):
    """`BlockAttention` that attends by the kernel."""

    attend = staticmethod(attend)
