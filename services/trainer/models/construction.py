"""Build any family's model from the parts of Tunix's Qwen3, as the record of the family says.

google-tunix 0.1.7 has a Qwen2, a Llama 3 and a Gemma of its own, with the same parts as its Qwen3 or with fixed
numbers: its Llama and Gemma have no dtype of activations apart from the parameters', its Gemma always uses θ = 1e4 and
divides scores by √head_dim, and its experts' weights always add up to 1.
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

from services.trainer.models.attention import ScoreOptions
from services.trainer.models.latent import LatentAttention
from services.trainer.models.options import Remat
from shared.models.config import ModelConfig
from shared.models.family_parts import Experts

_FLOAT32 = jnp.dtype(jnp.float32)
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


class GatedMLP(qwen3.MLP):
    """Feed-forward part with SiLU: down(silu(gate(x)) · up(x)).

    The barriers keep XLA for CPUs from computing the gradients of gate and up while it transposes them for the products
    that follow: element by element across memory, which took a fifteenth of a step's time.
    """

    activation = staticmethod(nnx.silu)

    def block(self, x: jax.Array) -> jax.Array:
        gate, up = (jax.lax.optimization_barrier(made(x)) for made in (self.gate_proj, self.up_proj))
        # Tunix shards by such tuples itself; only the annotation of `shard` lacks None.
        inner = qwen3.shard(self.activation(gate) * up, self.shd_config.act_btf)  # pyrefly: ignore[bad-argument-type]
        return self.down_proj(inner)


class GeluMLP(GatedMLP):
    """The same with the tanh approximation of GELU."""

    activation = staticmethod(partial(nnx.gelu, approximate=True))


_MLPS: dict[str, type[GatedMLP]] = {"silu": GatedMLP, "gelu_pytorch_tanh": GeluMLP}


def create(model: ModelConfig, dtype: str, remat: Remat) -> qwen3.Qwen3:
    """Build the model with arbitrary parameters; `dtype` is that of activations."""
    family, rngs = model.family, nnx.Rngs(0)
    made: Any = qwen3.Qwen3(_config(model, dtype, remat), rngs=rngs)
    if family.scaled_embeddings:
        types = {"dtype": made.config.dtype, "param_dtype": _FLOAT32}
        shardings = made.config.shd_config
        made.embedder = ScaledEmbedder(model.vocab_size, model.hidden_size, rngs=rngs, shd_config=shardings, **types)
    if family.norms_add_one or family.output_norms:
        _replace_norms(made, model, rngs)
    for i, layer in enumerate(made.layers):
        if family.latent is not None:
            layer.attn = LatentAttention(model, made.config, rngs)
        elif not family.qk_norm:
            del layer.attn.q_norm, layer.attn.k_norm
        if family.qkv_bias:
            _add_biases(layer.attn, model)
        if model.attention is not None:
            cap, window = model.attention.attn_logit_softcapping, model.attention.window(i)
            layer.attn.scores = ScoreOptions(scale=model.attention.scale, softcap=cap, window=window)
        if model.experts is not None and i < model.experts.first_k_dense_replace:
            layer.mlp = GatedMLP(replace(made.config, hidden_dim=model.intermediate_size), rngs=rngs)
        elif model.experts is not None:
            layer.mlp.norm_topk_prob = model.experts.norm_topk_prob
            if model.experts.shared_expert_intermediate_size is not None:
                _add_shared_expert(layer.mlp, made.config, model.experts.shared_expert_intermediate_size, rngs)
            if model.experts.n_group is not None:
                _add_groups(layer.mlp, made.config, model.experts, rngs)
            _shard_experts(layer.mlp)
        else:
            layer.mlp = _MLPS[family.activation](made.config, rngs=rngs)
    return made


def _config(model: ModelConfig, dtype: str, remat: Remat) -> qwen3.ModelConfig:
    experts = model.experts
    return qwen3.ModelConfig(
        hidden_dim=model.intermediate_size if experts is None else experts.moe_intermediate_size,
        num_experts=None if experts is None else experts.num_experts,
        num_experts_per_tok=None if experts is None else experts.num_experts_per_tok,
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_key_value_heads,
        rope_theta=int(model.rope_theta),  # unused: `decoder` computes rotary positions
        norm_eps=model.rms_norm_eps,
        use_tied_embedding=model.tie_word_embeddings,
        dtype=jnp.dtype(dtype),
        param_dtype=_FLOAT32,
        remat_config=qwen3.RematConfig[remat.upper()],
    )


def _replace_norms(made: Any, model: ModelConfig, rngs: nnx.Rngs) -> None:
    """Make all norms of the kind that the family has, those of outputs included."""
    family, config = model.family, made.config
    kind = OffsetNorm if family.norms_add_one else qwen3.RMSNorm

    def norm(size: int) -> qwen3.RMSNorm:
        types = {"dtype": config.dtype, "param_dtype": _FLOAT32}
        return kind(size, norm_eps=model.rms_norm_eps, rngs=rngs, shd_config=config.shd_config, **types)

    made.final_norm = norm(model.hidden_size)
    for layer in made.layers:
        for name in (*_NORMS, *_OUTPUT_NORMS) if family.output_norms else _NORMS:
            setattr(layer, f"{name}_layernorm", norm(model.hidden_size))
        layer.attn.q_norm, layer.attn.k_norm = norm(model.head_dim), norm(model.head_dim)


def _add_biases(attn: Any, model: ModelConfig) -> None:
    """Biases [heads · H], sharded with their heads."""
    heads = {"q_bias": model.num_attention_heads, "k_bias": model.num_key_value_heads}
    heads["v_bias"] = model.num_key_value_heads
    for name, n in heads.items():
        setattr(attn, name, nnx.Param(jnp.zeros(n * model.head_dim, jnp.float32), out_sharding=("tp",)))


def _add_shared_expert(mlp: Any, config: qwen3.ModelConfig, size: int, rngs: nnx.Rngs) -> None:
    """Expert of every token, with the gate that weighs it."""
    mlp.shared_expert = GatedMLP(replace(config, hidden_dim=size), rngs=rngs)
    gate = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, None))
    types = {"dtype": config.dtype, "param_dtype": _FLOAT32}
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
