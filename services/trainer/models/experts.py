"""The feed-forward part of a layer as a mixture of experts, of which each token is sent to a few.

Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017, as Qwen3-MoE
has it: softmax over all experts in float32, then the best of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def mixed(mlp: Any, x: jax.Array, given: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """[B, T, D] of x [B, T, D]: the sum of what a token's experts make of it, by their weights; and bool [B, T], which
    tokens' experts are others than the router's own choice.

    Args:
        mlp: Tunix's MoELayer, with `norm_topk_prob`: its router [D, E], and gate, up [E, D, F] and down [E, F, D].
        given: int [B, T, k], the experts that a token is sent to, in any order, and -1 where the router chooses.
            Their weights are its probabilities of them all the same, with their gradient (see shared.routing).

    Every expert is computed for every token, one after the other, and keeps nothing for the backward pass: the memory
    is that of one dense layer, whatever the tokens choose, and the program one expert's. The work is E / k times what
    is needed.
    """
    weights, differs = _of_experts(mlp, x, given)

    def add(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        gate, up, down, weight = expert
        inner = jax.nn.silu(x @ gate.astype(x.dtype)) * (x @ up.astype(x.dtype))
        return total + (inner @ down.astype(x.dtype)) * weight[..., None].astype(x.dtype), None

    matrices = (one.get_value() for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    total, _ = jax.lax.scan(jax.checkpoint(add), jnp.zeros_like(x), (*matrices, jnp.moveaxis(weights, -1, 0)))
    return total, differs


def _of_experts(mlp: Any, x: jax.Array, given: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """float32 [B, T, E]: the weight of every expert for every token, 0 for those that were not chosen; and bool [B, T]:
    see `mixed`.
    """
    kernel = mlp.router.kernel.get_value().astype(x.dtype)
    scores = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(scores, axis=-1)
    best, chosen = jax.lax.top_k(probabilities, mlp.experts_per_tok)
    differs = jnp.zeros(x.shape[:2], bool)
    if given is not None:
        own, chosen = chosen, jnp.where(given >= 0, given, chosen)
        best = jnp.take_along_axis(probabilities, chosen, axis=-1)
        differs = (jnp.sort(own, axis=-1) != jnp.sort(chosen, axis=-1)).any(-1)
    if mlp.norm_topk_prob:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    weights = jnp.sum(jax.nn.one_hot(chosen, mlp.num_experts, dtype=jnp.float32) * best[..., None], axis=-2)
    return weights, differs
