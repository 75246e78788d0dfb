"""The feed-forward part of a layer as a mixture of experts, of which each token is sent to a few.

Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017, as Qwen3-MoE
has it: softmax over all experts in float32, then the best of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def mixed(mlp: Any, x: jax.Array) -> jax.Array:
    """[B, T, D] of x [B, T, D]: the sum of what a token's experts make of it, by their weights.

    Args:
        mlp: Tunix's MoELayer, with `norm_topk_prob`: its router [D, E], and gate, up [E, D, F] and down [E, F, D].

    Every expert is computed for every token, one after the other, and keeps nothing for the backward pass: the memory
    is that of one dense layer, whatever the tokens choose, and the program one expert's. The work is E / k times what
    is needed.
    """
    weights = _of_experts(mlp, x)

    def add(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        gate, up, down, weight = expert
        inner = jax.nn.silu(x @ gate.astype(x.dtype)) * (x @ up.astype(x.dtype))
        return total + (inner @ down.astype(x.dtype)) * weight[..., None].astype(x.dtype), None

    matrices = (one.get_value() for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    total, _ = jax.lax.scan(jax.checkpoint(add), jnp.zeros_like(x), (*matrices, jnp.moveaxis(weights, -1, 0)))
    return total


def _of_experts(mlp: Any, x: jax.Array) -> jax.Array:
    """float32 [B, T, E]: the weight of every expert for every token, 0 for those that were not chosen."""
    kernel = mlp.router.kernel.get_value().astype(x.dtype)
    scores = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), mlp.experts_per_tok)
    if mlp.norm_topk_prob:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    return jnp.sum(jax.nn.one_hot(chosen, mlp.num_experts, dtype=jnp.float32) * best[..., None], axis=-2)
