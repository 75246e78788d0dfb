"""Grouped matrix products of experts for GPUs, as a Triton kernel.

XLA computes `jax.lax.ragged_dot` on GPUs as a product of all rows with every expert. Here each program multiplies a
block of one expert's rows with some of its columns, so the work is that of the rows, and a decode reads only weights of
experts that have rows (as MegaBlocks: Gale et al., 2023).

Products take operands of their own dtype and accumulate float32. Those of float32 operands are float32, not TF32.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


@dataclasses.dataclass(frozen=True)
class _ProductTiles:
    """Sizes of a program, all powers of two: rows and columns of its result, and how many products it adds at once."""

    rows: int
    columns: int
    inner: int

    @classmethod
    def of(cls, rows_each: int, n: int, dtype: Any) -> _ProductTiles:
        """Choose sizes for experts of about `rows_each` rows and n columns. Dot products need 16 of each."""
        most, columns, inner = (64, 64, 32) if jnp.dtype(dtype) == jnp.float32 else (128, 128, 64)
        rows = max(16, min(most, pl.next_power_of_2(max(rows_each, 1))))
        return cls(rows, max(16, min(columns, pl.next_power_of_2(n))), inner)


def grouped_products(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any,
    group_offset: jax.Array | None = None,
    interpret: bool = False,
    **_: Any,
) -> jax.Array:
    """`products.expert_products` on GPUs. `interpret`: run the kernel as plain JAX, on any device."""
    (m, k), n_experts, n = lhs.shape, rhs.shape[0], rhs.shape[2]
    first = jnp.int32(0) if group_offset is None else jnp.reshape(group_offset, ())
    sizes = jax.lax.dynamic_slice_in_dim(group_sizes, first, n_experts)
    before = jnp.where(jnp.arange(len(group_sizes)) < first, group_sizes, 0).sum()
    tiles = _ProductTiles.of(m // len(group_sizes), n, lhs.dtype)
    plan = _plan(before, sizes, m, tiles.rows)
    out = pl.pallas_call(
        partial(_one_block, tiles=tiles, k=k, n=n),
        grid=(len(plan), pl.cdiv(n, tiles.columns)),
        out_shape=jax.ShapeDtypeStruct((m, n), preferred_element_type),
        compiler_params=triton.CompilerParams(num_warps=8 if tiles.rows * tiles.columns > 8192 else 4, num_stages=3),
        interpret=interpret,
        name="expert_products",
    )(plan, lhs, rhs)
    row = jnp.arange(m)
    return jnp.where(((row >= before) & (row < before + sizes.sum()))[:, None], out, 0)


def _plan(before: jax.Array, sizes: jax.Array, m: int, block: int) -> jax.Array:
    """Return int32[blocks, 3]: expert, first row, number of rows; 0 rows in blocks that are left over."""
    blocks = (sizes + block - 1) // block
    ends = jnp.cumsum(blocks)
    index = jnp.arange((m + len(sizes) * (block - 1)) // block)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), len(sizes) - 1)
    done = (index - (ends - blocks)[expert]) * block
    starts = before + jnp.cumsum(sizes) - sizes
    columns = expert, starts[expert] + done, jnp.clip(sizes[expert] - done, 0, block)
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _one_block(
    plan_ref: Any, lhs_ref: Any, rhs_ref: Any, out_ref: Any, *, tiles: _ProductTiles, k: int, n: int
) -> None:
    """Multiply one block of an expert's rows with one block of its columns."""
    expert, start, n_rows = (plan_ref[pl.program_id(0), column] for column in range(3))
    row = jnp.arange(tiles.rows)
    column = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns)
    is_row, is_column = (row < n_rows)[:, None], (column < n)[None, :]
    precision = jax.lax.Precision.HIGHEST if lhs_ref.dtype == jnp.float32 else None

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        inner = i * tiles.inner + jnp.arange(tiles.inner)
        held, wanted = is_row, is_column
        if k % tiles.inner:
            held, wanted = held & (inner < k)[None, :], wanted & (inner < k)[:, None]
        a = triton.load(lhs_ref.at[(start + row)[:, None], inner[None, :]], mask=held, other=0)
        b = triton.load(rhs_ref.at[expert, inner[:, None], column[None, :]], mask=wanted, other=0)
        return total + jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    steps = jnp.where(n_rows > 0, jnp.int32(pl.cdiv(k, tiles.inner)), jnp.int32(0))
    total = jax.lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    at = (start + row)[:, None], column[None, :]
    triton.store(out_ref.at[at], total.astype(out_ref.dtype), mask=is_row & is_column)
