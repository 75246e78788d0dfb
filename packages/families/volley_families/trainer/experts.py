"""Mixture of experts: a feed-forward part where each token is routed to a few experts.

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017, in the
variant of Qwen3-MoE: softmax over all experts in float32, then the best of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tunix.models.qwen3 import model as qwen3

from shared.models.family_parts import Experts


class RoutedExperts(qwen3.MoELayer):
    """Tunix's layer, computed by `mixed`, with `norm_topk_prob`: the weights of the chosen experts add up to 1."""

    norm_topk_prob: bool

    def mixed(self, x: jax.Array, given: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """See `mixed`."""
        return mixed(self, x, given)


def mixed(mlp: Any, x: jax.Array, given: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Compute the weighted sum [B, T, D] of the experts' outputs for x [B, T, D].

    Also returns bool [B, T]: tokens whose experts differ from the router's choice.

    Args:
        mlp: RoutedExperts: its router [D, E], and gate, up [E, D, F] and down [E, F, D].
        given: int [B, T, k], the experts of each token, in any order; -1: the router chooses. Their weights are the
            router's probabilities of them, with gradient (see shared.routing).

    Every expert is computed for every token, one expert after the other, and keeps nothing for the backward pass. So
    memory and program size are those of one dense layer, whatever the tokens choose; the work is E / k times the
    minimum.
    """
    weights, differs = _of_experts(mlp, x, given)

    def add(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        gate, up, down, weight = expert
        inner = jax.nn.silu(x @ gate.astype(x.dtype)) * (x @ up.astype(x.dtype))
        return total + (inner @ down.astype(x.dtype)) * weight[..., None].astype(x.dtype), None

    matrices = (one.get_value() for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    total, _ = jax.lax.scan(jax.checkpoint(add), jnp.zeros_like(x), (*matrices, jnp.moveaxis(weights, -1, 0)))
    if hasattr(mlp, "shared_expert"):  # as in Qwen2-MoE
        total = total + jax.nn.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
    if hasattr(mlp, "shared_experts"):  # as in DeepSeek-V3
        total = total + mlp.shared_experts(x)
    return total, differs


def _of_experts(mlp: Any, x: jax.Array, given: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Weights of experts for every token, float32 [B, T, E], 0 if not chosen; and bool [B, T] as in `mixed`."""
    kernel = mlp.router.kernel.get_value().astype(x.dtype)
    scores = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    groups: Experts | None = getattr(mlp, "groups", None)
    if groups is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
        best, chosen = jax.lax.top_k(probabilities, mlp.experts_per_tok)
    else:
        probabilities = jax.nn.sigmoid(scores)
        chosen = _chosen_in_groups(probabilities + mlp.router_bias.get_value(), groups)
        best = jnp.take_along_axis(probabilities, chosen, axis=-1)
    differs = jnp.zeros(x.shape[:2], bool)
    if given is not None:
        own, chosen = chosen, jnp.where(given >= 0, given, chosen)
        best = jnp.take_along_axis(probabilities, chosen, axis=-1)
        differs = (jnp.sort(own, axis=-1) != jnp.sort(chosen, axis=-1)).any(-1)
    if mlp.norm_topk_prob:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    if groups is not None:
        best = best * groups.routed_scaling_factor
    weights = jnp.sum(jax.nn.one_hot(chosen, mlp.num_experts, dtype=jnp.float32) * best[..., None], axis=-2)
    return weights, differs


def _chosen_in_groups(scores: jax.Array, groups: Experts) -> jax.Array:
    """Choose experts int [B, T, k] by scores [B, T, E], within the groups whose best two scores sum up highest.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024. Without gradient.
    """
    assert groups.n_group is not None
    assert groups.topk_group is not None
    scores = jax.lax.stop_gradient(scores)
    of_groups = jax.lax.top_k(scores.reshape(*scores.shape[:-1], groups.n_group, -1), 2)[0].sum(-1)
    kept = jax.nn.one_hot(jax.lax.top_k(of_groups, groups.topk_group)[1], groups.n_group).sum(-2)
    allowed = jnp.repeat(kept > 0, groups.num_experts // groups.n_group, axis=-1)
    return jax.lax.top_k(jnp.where(allowed, scores, -jnp.inf), groups.num_experts_per_tok)[1]
