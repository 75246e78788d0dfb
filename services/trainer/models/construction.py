"""Build a model of Llama's or Qwen's architecture from the parts of Tunix's Qwen3, as the record of the family says.

google-tunix 0.1.7 has a Qwen2 and a Llama 3 of its own, with the same parts as its Qwen3; its Llama has no dtype of
activations apart from the parameters'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from services.trainer.models.attention import ScoreOptions
from services.trainer.models.options import Remat
from shared import packages
from shared.models.config import ModelConfig

FLOAT32 = jnp.dtype(jnp.float32)


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


def create(model: ModelConfig, dtype: str, remat: Remat) -> qwen3.Qwen3:
    """Build the model with arbitrary parameters; `dtype` is that of activations.

    Raises ConfigError if the package of the family's further parts is not installed.
    """
    family, rngs = model.family, nnx.Rngs(0)
    made: Any = qwen3.Qwen3(_config(model, dtype, remat), rngs=rngs)
    for i, layer in enumerate(made.layers):
        if not family.qk_norm:
            del layer.attn.q_norm, layer.attn.k_norm
        if family.qkv_bias:
            _add_biases(layer.attn, model)
        if model.attention is not None:
            cap, window = model.attention.attn_logit_softcapping, model.attention.window(i)
            layer.attn.scores = ScoreOptions(scale=model.attention.scale, softcap=cap, window=window)
        if model.experts is None:
            layer.mlp = GatedMLP(made.config, rngs=rngs)
    if family.has_further_parts:
        packages.part("model_parts")(made, model, rngs)
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
        param_dtype=FLOAT32,
        remat_config=qwen3.RematConfig[remat.upper()],
    )


def _add_biases(attn: Any, model: ModelConfig) -> None:
    """Biases [heads · H], sharded with their heads."""
    heads = {"q_bias": model.num_attention_heads, "k_bias": model.num_key_value_heads}
    heads["v_bias"] = model.num_key_value_heads
    for name, n in heads.items():
        setattr(attn, name, nnx.Param(jnp.zeros(n * model.head_dim, jnp.float32), out_sharding=("tp",)))
