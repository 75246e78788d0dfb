"""Tunix's Qwen3: construction on a mesh, and the forward pass up to the last hidden state.

Invariants: logits of a whole sequence are never built here; sequences are right-padded, so the causal mask alone keeps
real tokens from attending to padding; the result equals Hugging Face's Qwen3 for any rope_theta.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as tunix_qwen3

from services.trainer.models.initial_weights import Leaves
from shared.errors import ConfigError
from shared.models.config import ModelConfig

type Qwen3 = tunix_qwen3.Qwen3
type Remat = Literal["none", "block", "decoder"]
_TUNIX_ROPE_THETA = 1_000_000.0
_REMAT = {
    "none": tunix_qwen3.RematConfig.NONE,
    "block": tunix_qwen3.RematConfig.BLOCK,
    "decoder": tunix_qwen3.RematConfig.DECODER,
}


def make_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh over the first prod(shape) devices; an axis of Tunix's that is not named has size 1.

    Raises ConfigError if there are too few devices.
    """
    absent = tuple(axis for axis in ("fsdp", "tp") if axis not in axis_names)
    shape, axis_names = (*shape, *(1 for _ in absent)), (*axis_names, *absent)
    n, have = int(np.prod(shape)), jax.device_count()
    if n > have:
        raise ConfigError(
            f"trainer.mesh.shape={list(shape)} needs {n} devices, {have} are here", "choose a smaller mesh"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, axis_names, axis_types=axis_types, devices=jax.devices()[:n])


def build(model: ModelConfig, leaves: Leaves, mesh: jax.sharding.Mesh, *, dtype: str, remat: Remat = "none") -> Qwen3:
    """A model whose parameters are float32 and sharded over `mesh`; `dtype` is that of activations.

    Raises ConfigError if a dimension does not divide over its mesh axis, or a tensor is missing.
    """
    config = _config(model, dtype, remat)
    with mesh:
        abstract = nnx.eval_shape(lambda: tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    return nnx.merge(graph, fill(state, leaves, mesh))


def float32_graph(model: Qwen3) -> Any:
    """The graph of the same model with float32 activations, to be merged with the state of `model`."""
    config = replace(model.config, dtype=jnp.float32)
    with model.embedder.input_embedding.get_value().sharding.mesh:
        return nnx.split(nnx.eval_shape(lambda: tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))))[0]


def fill(state: Any, leaves: Leaves, mesh: jax.sharding.Mesh) -> Any:
    """The same nnx state with every leaf taken from `leaves`, cast to the leaf's dtype and placed on the mesh."""
    filled = []
    for path, variable in nnx.to_flat_state(state):
        name = leaf_name(path)
        target = variable.get_value()
        sharding = _sharding(name, target.shape, variable, mesh)
        value = np.asarray(leaves(name, target.shape), target.dtype)
        filled.append((path, variable.replace(jax.device_put(value, sharding))))
    return nnx.from_flat_state(filled)


def leaf_name(path: tuple[Any, ...]) -> str:
    """("layers", 0, "attn", "q_proj", "w") -> layers.0.attn.q_proj.w"""
    return ".".join(str(part) for part in path)


def _config(model: ModelConfig, dtype: str, remat: Remat) -> tunix_qwen3.ModelConfig:
    return tunix_qwen3.ModelConfig(
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        hidden_dim=model.intermediate_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_key_value_heads,
        rope_theta=model.rope_theta,  # declared int, and unused by Tunix
        norm_eps=model.rms_norm_eps,
        use_tied_embedding=model.tie_word_embeddings,
        remat_config=_REMAT[remat],
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
    )


def _sharding(name: str, size: tuple[int, ...], variable: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    axes = variable.get_metadata()["out_sharding"]
    for dim, axis in zip(size, axes, strict=False):
        if axis is not None and dim % mesh.shape[axis]:
            raise ConfigError(
                f"parameter {name} of shape {list(size)} does not divide over {axis}={mesh.shape[axis]}",
                "change trainer.mesh.shape",
            )
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


@jax.tree_util.register_pytree_node_class
class _Positions:
    """Positions [B, T] that make Tunix's rotary embedding turn by *our* theta.

    google-tunix 0.1.7 ignores `rope_theta` and always divides `positions[..., None]` by 1e6^(2i/d). This stands in for
    the positions array and answers that one indexing with positions * (1e6/theta)^(2i/d), so that the quotient is
    positions / theta^(2i/d). Nothing of Tunix is patched.
    """

    def __init__(self, scaled: jax.Array) -> None:
        self._scaled = scaled

    @classmethod
    def of(cls, positions: jax.Array, theta: float, head_dim: int) -> _Positions:
        exponent = 2 * np.arange(head_dim // 2) / head_dim
        scale = np.asarray((_TUNIX_ROPE_THETA / theta) ** exponent, np.float32)
        return cls(positions.astype(jnp.float32)[..., None] * scale)

    def __getitem__(self, index: Any) -> jax.Array:
        if index != (Ellipsis, None):
            raise TypeError(
                f"unexpected use of positions: [{index!r}]; this Tunix is not the version this was written for"
            )
        return self._scaled

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self._scaled,), None

    @classmethod
    def tree_unflatten(cls, _aux: None, children: tuple[jax.Array]) -> _Positions:
        return cls(*children)


def hidden_states(model: Qwen3, ids: jax.Array) -> jax.Array:
    """Normalized last hidden states [B, T, D] of right-padded ids int32 [B, T]."""
    length = ids.shape[1]
    positions = _Positions.of(jnp.arange(length)[None], model.config.rope_theta, model.config.head_dim)
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    x = model.embedder.encode(ids)
    for layer in model.layers:
        _, x = layer(x, positions, None, causal)
    return model.final_norm(x)


def head(model: Qwen3) -> jax.Array:
    """The output projection as [V, D] (tied embeddings) or the transpose of [D, V]; in the activations' dtype."""
    weight = (
        model.embedder.input_embedding.get_value() if model.config.use_tied_embedding else model.lm_head.w.get_value().T
    )
    return weight.astype(model.config.dtype)
