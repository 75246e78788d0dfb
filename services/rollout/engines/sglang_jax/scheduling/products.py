"""Matrix products that replace the engine's where it rounds too early or XLA for CPUs is slow.

XLA for CPUs has a fast kernel for bfloat16 operands only if the result is float32 and neither operand is transposed
first. Any other bfloat16 product converts the whole weight matrix to float32 at every step. The engine's kernel for
experts is written for TPUs; on CPUs it would be interpreted, and refuses numbers of rows that do not suit its tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.linear import LinearBase
from sgl_jax.srt.layers.logits_processor import LogitsProcessor

_ROWS_WITH_ROWS = (((1,), (1,)), ((), ()))
_ROWS_WITH_COLUMNS = (((1,), (0,)), ((), ()))
_EXPERT_BLOCK = 16
"""Rows of one expert that are multiplied at once."""


def float32_logits(processor: LogitsProcessor, hidden_states: jax.Array, lm_head: Any) -> jax.Array:
    """Replaces `LogitsProcessor._get_logits`: accumulates and keeps float32 where the engine rounds logits to bfloat16.

    The engine's log-probabilities are then within 1e-6 of its own prefill's instead of 6e-2.
    """
    hidden, embedding = lm_head.promote_dtype((hidden_states, lm_head.embedding.value), dtype=lm_head.dtype)
    hidden = jax.sharding.reshard(hidden, NamedSharding(processor.mesh, P("data", None)))
    sharding = NamedSharding(processor.mesh, P("data", "tensor"))
    logits = jax.lax.dot_general(
        hidden, embedding, _ROWS_WITH_ROWS, preferred_element_type=jnp.float32, out_sharding=sharding
    )
    logits = logits[..., : processor.vocab_size]
    return processor.soft_cap * jnp.tanh(logits / processor.soft_cap) if processor.soft_cap else logits


def linear_through_float32(
    layer: LinearBase, x: jax.Array, *, out_sharding: jax.sharding.Sharding | None = None
) -> tuple[jax.Array, jax.Array | nnx.Param | None]:
    """Replaces `LinearBase.__call__` on CPUs: accumulates in float32 and rounds the result once.

    Args:
        x: [..., in].
    Returns: [..., out] in the layer's dtype, and the bias if the caller is to add it.
    """
    assert layer.kernel_axes is not None
    target = out_sharding or NamedSharding(layer.mesh, P("data", *([None] * (x.ndim - 2)), layer.kernel_axes[-1]))
    inner = (((x.ndim - 1,), (0,)), ((), ()))
    out = jax.lax.dot_general(
        x, layer.weight.value, inner, preferred_element_type=jnp.float32, out_sharding=target
    ).astype(layer.params_dtype or x.dtype)
    if layer.skip_bias_add or layer.bias is None:
        return out, layer.bias if layer.skip_bias_add else None
    return out + layer.bias.value, None


def expert_products(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any,
    group_offset: jax.Array | None = None,
    **_: Any,
) -> jax.Array:
    """Replaces the engine's grouped matrix product (`gmm`) on CPUs, for weights that are not quantized.

    Args:
        lhs: [m, k], rows sorted by expert.
        rhs: [E, k, n], weights of the experts that this device has.
        group_sizes: int32[all experts], rows of each expert.
        preferred_element_type: dtype of the result.
        group_offset: int32[1] or int32[], number of the first expert that this device has.
    Returns: [m, n]; rows of experts that this device does not have are 0.
    """
    rows = jnp.pad(lhs, ((0, _EXPERT_BLOCK), (0, 0)))
    first = 0 if group_offset is None else jnp.reshape(group_offset, ())
    starts = jnp.cumsum(group_sizes) - group_sizes

    def expert(e: jax.Array, out: jax.Array) -> jax.Array:
        start, size = starts[first + e], group_sizes[first + e]

        def block(i: jax.Array, out: jax.Array) -> jax.Array:
            at = start + i * _EXPERT_BLOCK
            some = jax.lax.dynamic_slice_in_dim(rows, at, _EXPERT_BLOCK)
            product = jax.lax.dot_general(some, rhs[e], _ROWS_WITH_COLUMNS, preferred_element_type=jnp.float32)
            inside = (i * _EXPERT_BLOCK + jnp.arange(_EXPERT_BLOCK) < size)[:, None]
            others = jax.lax.dynamic_slice_in_dim(out, at, _EXPERT_BLOCK)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside, product.astype(out.dtype), others), at, 0)

        return jax.lax.fori_loop(0, (size + _EXPERT_BLOCK - 1) // _EXPERT_BLOCK, block, out)

    empty = jnp.zeros((rows.shape[0], rhs.shape[-1]), preferred_element_type)
    return jax.lax.fori_loop(0, rhs.shape[0], expert, empty)[: lhs.shape[0]]
