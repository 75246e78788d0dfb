"""Multi-head latent attention: projections of queries, keys and values by way of few numbers a token.

Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, not absorbed: keys and values of all heads are computed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from services.trainer.models.attention import ScoreOptions
from shared.models.config import ModelConfig
from shared.models.family_parts import Latent


class LatentAttention(nnx.Module):
    """Parameters of a layer's attention; matrices are [in, out], those with heads split over `tp`."""

    def __init__(self, model: ModelConfig, config: qwen3.ModelConfig, rngs: nnx.Rngs) -> None:
        assert model.latent is not None
        sizes, heads, hidden = model.latent, model.num_attention_heads, model.hidden_size
        self.config, self.shd_config, self.n_heads, self.sizes = config, config.shd_config, heads, sizes

        def linear(n_in: int, n_out: int, axes: tuple[str | None, str | None]) -> nnx.Linear:
            kernel = nnx.with_partitioning(nnx.initializers.zeros_init(), axes)
            types = {"dtype": config.dtype, "param_dtype": jnp.float32}
            return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=kernel, rngs=rngs, **types)

        def norm(size: int) -> qwen3.RMSNorm:
            types = {"dtype": config.dtype, "param_dtype": jnp.dtype(jnp.float32)}
            return qwen3.RMSNorm(size, norm_eps=1e-6, rngs=rngs, shd_config=config.shd_config, **types)

        if sizes.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * sizes.qk_head_dim, ("fsdp", "tp"))
        else:
            self.q_a_proj = linear(hidden, sizes.q_lora_rank, ("fsdp", None))
            self.q_a_layernorm = norm(sizes.q_lora_rank)
            self.q_b_proj = linear(sizes.q_lora_rank, heads * sizes.qk_head_dim, (None, "tp"))
        self.kv_a_proj_with_mqa = linear(hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim, ("fsdp", None))
        self.kv_a_layernorm = norm(sizes.kv_lora_rank)
        self.kv_b_proj = linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), (None, "tp"))
        self.o_proj = linear(heads * sizes.v_head_dim, hidden, ("tp", "fsdp"))

    def attend(
        self, x: jax.Array, rotate: Callable[[jax.Array], jax.Array], attention: Callable[..., jax.Array]
    ) -> jax.Array:
        """Compute a layer's attention [B, T, D] of x [B, T, D].

        Args:
            rotate: rotary positions of [B, T, heads, R]; turns the two halves of the last axis together.
            attention: of queries, keys and values [B, T, N, H] each, and ScoreOptions.
        """
        sizes: Latent = self.sizes
        heads = (*x.shape[:2], self.n_heads, -1)
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if hasattr(self, "q_a_proj") else self.q_proj(x)
        q, q_turned = jnp.split(queries.reshape(heads), [sizes.qk_nope_head_dim], axis=-1)
        latent, k_turned = jnp.split(self.kv_a_proj_with_mqa(x), [sizes.kv_lora_rank], axis=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(heads)
        k, v = jnp.split(expanded, [sizes.qk_nope_head_dim], axis=-1)
        q_turned, k_turned = rotate(_halves(q_turned)), rotate(_halves(k_turned[:, :, None]))
        q = jnp.concatenate([q, q_turned], axis=-1)
        k = jnp.concatenate([k, jnp.broadcast_to(k_turned, q_turned.shape)], axis=-1)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, sizes.qk_head_dim - sizes.v_head_dim)))
        mixed = attention(q, k, v, ScoreOptions(scale=sizes.qk_head_dim**-0.5))[..., : sizes.v_head_dim]
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


def _halves(x: jax.Array) -> jax.Array:
    """Put the first numbers of all pairs (x0, x1), (x2, x3), … before the second ones."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
