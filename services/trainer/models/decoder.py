"""Forward pass of every family, from token ids to the last hidden state.

Projections, norms and feed-forward layers are Tunix's; rotary embedding and attention are ours. google-tunix 0.1.7
always uses θ = 1e6 for Qwen3, rounds sine and cosine to the activations' dtype, and computes the attention of all
positions to all at once.

Invariants: logits of a whole sequence are never computed here. No token sees a token of another sequence, or padding
(see `attention`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3.model import shard

from services.trainer.models import attention
from services.trainer.models.attention import Packing, ScoreOptions
from services.trainer.models.splash import KernelAttention

_BIASES = {"q_proj": "q_bias", "k_proj": "k_bias", "v_proj": "v_bias"}


class _Places(NamedTuple):
    """Positions of tokens in their sequences, int32 [B or 1, T], with sine and cosine, float32 [B or 1, T, 1, H/2].

    `visible_until` is described in `attention`.
    """

    positions: jax.Array
    sin: jax.Array
    cos: jax.Array
    visible_until: jax.Array | None


def hidden_states(
    model: Any, ids: jax.Array, packing: Packing | None = None, routed: jax.Array | None = None
) -> jax.Array:
    """Compute normalized last hidden states [B, T, D] of ids int32 [B, T], right-padded or packed.

    `routed` as in `routed_states`.
    """
    return routed_states(model, ids, packing, routed)[0]


def routed_states(
    model: Any, ids: jax.Array, packing: Packing | None, routed: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Compute hidden states, and for each token the share of layers in which `routed` differs from the router's choice.

    The share is float32 [B, T] of the layers with experts, 0 without `routed`.

    Args:
        routed: int [B, T, L, k], the experts of each token in each layer that has some; -1: the router chooses.
    """
    positions = attention.positions(ids, packing)
    visible_until = None if packing is None else packing.visible_until
    places = _places(model, positions, visible_until)
    layer = nnx.remat(_layer) if _remat(model) == "decoder" else _layer
    x = model.embedder.encode(ids)
    differing, n_routed = jnp.zeros(ids.shape, jnp.float32), 0
    for i, one in enumerate(model.layers):
        has_experts = hasattr(one.mlp, "router")
        x, differs = layer(one, x, places[i], routed[:, :, n_routed] if has_experts and routed is not None else None)
        differing, n_routed = differing + (0.0 if differs is None else differs), n_routed + has_experts
    return model.final_norm(x), differing / max(1, n_routed)


def _places(model: Any, positions: jax.Array, visible_until: jax.Array | None) -> list[_Places]:
    """Places for each layer; layers with the same frequencies share the arrays."""
    frequencies = [np.float32(model.described.rope_frequencies(i)) for i in range(len(model.layers))]
    made: dict[bytes, _Places] = {}
    for one in frequencies:
        if one.tobytes() not in made:
            angles = (positions[..., None].astype(jnp.float32) * one)[:, :, None]
            made[one.tobytes()] = _Places(positions, jnp.sin(angles), jnp.cos(angles), visible_until)
    return [made[one.tobytes()] for one in frequencies]


def _remat(part: Any) -> str:
    return part.config.remat_config.name.lower()


def _layer(layer: Any, x: jax.Array, places: _Places, given: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Output of a layer, and the tokens for which `given` differs from the router's choice."""
    attend = nnx.remat(_attend) if _remat(layer) == "block" else _attend
    attended = attend(layer.attn, layer.input_layernorm(x), places)
    if hasattr(layer, "pre_feedforward_layernorm"):  # output norms, as in Gemma
        x = x + layer.post_attention_layernorm(attended)
        return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x))), None
    x = x + attended
    normed = layer.post_attention_layernorm(x)
    made, differs = layer.mlp.mixed(normed, given) if hasattr(layer.mlp, "router") else (layer.mlp(normed), None)
    return x + made, differs


def _attend(attn: Any, x: jax.Array, places: _Places) -> jax.Array:
    if hasattr(attn, "attend"):  # of DeepSeek
        attended = attn.attend(x, lambda one: _rotated(one, places), partial(_by_blocks, places=places))
        return shard(attended, attn.shd_config.act_btd)
    q, k, v = (shard(_projected(attn, name, x), attn.shd_config.act_btnh) for name in _BIASES)
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    scores = getattr(attn, "scores", ScoreOptions())
    parts = _rotated(q, places), _rotated(k, places), v, places.visible_until, scores, places.positions
    kernels: KernelAttention | None = getattr(attn, "splash", None)
    mixed = kernels.attend(*parts) if kernels is not None and kernels.fits(q.shape) else attention.attend(*parts)
    return shard(attn.o_proj(mixed), attn.shd_config.act_btd)


def _by_blocks(q: jax.Array, k: jax.Array, v: jax.Array, options: ScoreOptions, *, places: _Places) -> jax.Array:
    return attention.attend(q, k, v, places.visible_until, options, places.positions)


def _projected(attn: Any, name: str, x: jax.Array) -> jax.Array:
    """[B, T, heads, H]."""
    made = getattr(attn, name)(x)
    bias = getattr(attn, _BIASES[name], None)
    return made if bias is None else made + bias.get_value().astype(made.dtype).reshape(made.shape[2:])


def _rotated(x: jax.Array, places: _Places) -> jax.Array:
    """Rotary embedding of [B, T, heads, H] in float32; the two halves of a head are rotated together."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * places.cos - second * places.sin, second * places.cos + first * places.sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
