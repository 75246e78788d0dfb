"""Parts of the trainer's models that only some families have, as the record of the family says.

google-tunix 0.1.7 has a Gemma of its own with fixed numbers: it always uses θ = 1e4 and divides scores by √head_dim;
and its experts' weights always add up to 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from services.trainer.models.construction import FLOAT32, GatedMLP
from shared.models.config import ModelConfig
from shared.models.family_parts import Experts
from volley_families.trainer.experts import RoutedExperts
from volley_families.trainer.latent import LatentAttention

_NORMS, _OUTPUT_NORMS = ("input", "post_attention"), ("pre_feedforward", "post_feedforward")


class ScaledEmbedder(qwen3.Embedder):
    """Embeddings times √D, rounded to the activations' dtype."""

    def encode(self, x: Any) -> jax.Array:
        found = super().encode(x)
        return found * jnp.asarray(math.sqrt(found.shape[-1]), found.dtype)


class OffsetNorm(qwen3.RMSNorm):
    """Norm that multiplies by 1 + w, in float32."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.astype(x, jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.norm_eps)
        return jnp.astype(normed * (1 + jnp.astype(self.w.get_value(), jnp.float32)), self.dtype)


class GeluMLP(GatedMLP):
    """The feed-forward part with the tanh approximation of GELU."""

    activation = staticmethod(partial(nnx.gelu, approximate=True))


def add_parts(made: Any, model: ModelConfig, rngs: nnx.Rngs) -> None:
    """Add to a model made of Qwen3's parts those that its family has, with arbitrary parameters."""
    family = model.family
    if family.scaled_embeddings:
        types = {"dtype": made.config.dtype, "param_dtype": FLOAT32}
        shardings = made.config.shd_config
        made.embedder = ScaledEmbedder(model.vocab_size, model.hidden_size, rngs=rngs, shd_config=shardings, **types)
    if family.norms_add_one or family.output_norms:
        _replace_norms(made, model, rngs)
    for i, layer in enumerate(made.layers):
        if family.latent is not None:
            layer.attn = LatentAttention(model, made.config, rngs)
        if model.experts is None:
            if family.activation != "silu":
                layer.mlp = GeluMLP(made.config, rngs=rngs)
        elif i < model.experts.first_k_dense_replace:
            layer.mlp = GatedMLP(replace(made.config, hidden_dim=model.intermediate_size), rngs=rngs)
        else:
            layer.mlp = _experts(made.config, model.experts, rngs)


def _experts(config: qwen3.ModelConfig, experts: Experts, rngs: nnx.Rngs) -> RoutedExperts:
    mlp = RoutedExperts(config, rngs=rngs)
    mlp.norm_topk_prob = experts.norm_topk_prob
    if experts.shared_expert_intermediate_size is not None:
        _add_shared_expert(mlp, config, experts.shared_expert_intermediate_size, rngs)
    if experts.n_group is not None:
        _add_groups(mlp, config, experts, rngs)
    _shard_experts(mlp)
    return mlp


def _replace_norms(made: Any, model: ModelConfig, rngs: nnx.Rngs) -> None:
    """Make all norms of the kind that the family has, those of outputs included."""
    family, config = model.family, made.config
    kind = OffsetNorm if family.norms_add_one else qwen3.RMSNorm

    def norm(size: int) -> qwen3.RMSNorm:
        types = {"dtype": config.dtype, "param_dtype": FLOAT32}
        return kind(size, norm_eps=model.rms_norm_eps, rngs=rngs, shd_config=config.shd_config, **types)

    made.final_norm = norm(model.hidden_size)
    for layer in made.layers:
        for name in (*_NORMS, *_OUTPUT_NORMS) if family.output_norms else _NORMS:
            setattr(layer, f"{name}_layernorm", norm(model.hidden_size))
        if family.qk_norm:
            layer.attn.q_norm, layer.attn.k_norm = norm(model.head_dim), norm(model.head_dim)


def _add_shared_expert(mlp: Any, config: qwen3.ModelConfig, size: int, rngs: nnx.Rngs) -> None:
    """Expert of every token, with the gate that weighs it."""
    mlp.shared_expert = GatedMLP(replace(config, hidden_dim=size), rngs=rngs)
    gate = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, None))
    types = {"dtype": config.dtype, "param_dtype": FLOAT32}
    mlp.shared_expert_gate = nnx.Linear(config.embed_dim, 1, use_bias=False, kernel_init=gate, rngs=rngs, **types)


def _add_groups(mlp: Any, config: qwen3.ModelConfig, experts: Experts, rngs: nnx.Rngs) -> None:
    """Shared experts, and the choice of experts within groups."""
    mlp.groups = experts
    mlp.router_bias = nnx.Param(jnp.zeros(experts.num_experts, jnp.float32), out_sharding=(None,))
    mlp.shared_experts = GatedMLP(replace(config, hidden_dim=experts.shared_size), rngs=rngs)


def _shard_experts(mlp: Any) -> None:
    """Shard experts over fsdp and the matrices of one over tp; every device has the whole router."""
    of = mlp.shd_config
    for name, axes in (
        ("gate_proj", of.exp_weight_edf),
        ("up_proj", of.exp_weight_edf),
        ("down_proj", of.exp_weight_efd),
    ):
        setattr(mlp, name, nnx.Param(getattr(mlp, name).get_value(), out_sharding=axes))
    mlp.router.kernel = nnx.Param(mlp.router.kernel.get_value(), out_sharding=(None, None))
