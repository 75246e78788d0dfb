"""Parameter names and orientations of Tunix and of Hugging Face, and the conversion between them.

The trainer loads and saves with these names, the rollout service reads checkpoints of either kind, and
`volley export` writes Hugging Face's.

| Tunix                               | Hugging Face                                |
|-------------------------------------|---------------------------------------------|
| embedder.input_embedding [V, D]     | model.embed_tokens.weight [V, D]            |
| final_norm.w [D]                    | model.norm.weight [D]                       |
| lm_head.w [D, V]                    | lm_head.weight [V, D]                       |
| layers.N.attn.{q,k,v}_proj.w [D, H, K] | model.layers.N.self_attn.….weight [HK, D] |
| layers.N.attn.{q,k,v}_bias [HK]     | model.layers.N.self_attn.….bias [HK]        |
| layers.N.attn.o_proj.w [H, K, D]    | model.layers.N.self_attn.o_proj.weight [D, HK] |
| layers.N.mlp.….kernel [in, out]     | model.layers.N.mlp.….weight [out, in]       |
| layers.N.mlp.router.kernel [D, E]   | model.layers.N.mlp.gate.weight [E, D]       |
| layers.N.mlp.….proj [E, in, out]    | model.layers.N.mlp.experts.….weight [E, out, in] |
| layers.N.….w, of norms              | model.layers.N.….weight                     |

Tunix stacks the experts in one array, files hold them one by one: model.layers.N.mlp.experts.up_proj.weight from
`hf_name` is model.layers.N.mlp.experts.0.up_proj.weight and so on in files (`in_files`). Names that only one family has
are in its record.
"""

from __future__ import annotations

import re

import numpy as np

from shared.models.families import families

BLOCK = {
    "attn.q_proj.w": "self_attn.q_proj.weight",
    "attn.k_proj.w": "self_attn.k_proj.weight",
    "attn.v_proj.w": "self_attn.v_proj.weight",
    "attn.o_proj.w": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.q_norm.w": "self_attn.q_norm.weight",
    "attn.k_norm.w": "self_attn.k_norm.weight",
    "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
    "mlp.up_proj.kernel": "mlp.up_proj.weight",
    "mlp.down_proj.kernel": "mlp.down_proj.weight",
    "mlp.router.kernel": "mlp.gate.weight",
    "mlp.gate_proj": "mlp.experts.gate_proj.weight",
    "mlp.up_proj": "mlp.experts.up_proj.weight",
    "mlp.down_proj": "mlp.experts.down_proj.weight",
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.w": "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.w": "post_feedforward_layernorm.weight",
}
_TOP = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
}


def is_leaf(name: str) -> bool:
    """True for a parameter name of Tunix."""
    match = re.fullmatch(r"layers\.\d+\.(.+)", name)
    return name in _TOP or (match is not None and match[1] in _block())


def hf_name(leaf: str) -> str:
    """Hugging Face name of a leaf: layers.0.attn.q_proj.w -> model.layers.0.self_attn.q_proj.weight.

    Raises KeyError.
    """
    if leaf in _TOP:
        return _TOP[leaf]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", leaf)
    if match is None or match[2] not in (block := _block()):
        raise KeyError(leaf)
    return f"model.layers.{match[1]}.{block[match[2]]}"


def _block() -> dict[str, str]:
    """Names in a layer, with those of single families."""
    return BLOCK | {leaf: name for family in families().values() for leaf, name in family.names.items()}


def is_experts(leaf: str) -> bool:
    """True for a leaf [E, in, out] that stacks a matrix of every expert."""
    return re.fullmatch(r"layers\.\d+\.mlp\.(gate|up|down)_proj", leaf) is not None


def is_of_attention(leaf: str) -> bool:
    """True for a parameter, or an adapter, of an attention module: its projections, biases and norms of q and k."""
    return ".attn." in leaf


def is_untrained(leaf: str) -> bool:
    """True for a parameter that gets no gradient by design, in the family that has it."""
    return leaf.endswith(tuple(f".{name}" for family in families().values() for name in family.untrained))


def in_files(name: str, n_experts: int) -> list[str]:
    """Tensors in Hugging Face's files that make up `hf_name`'s array of all experts, in order."""
    return [name.replace(".mlp.experts.", f".mlp.experts.{i}.") for i in range(n_experts)]


def to_files(leaf: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of Hugging Face's files that hold a leaf's array: one, or one for each expert. Raises KeyError."""
    name, array = hf_name(leaf), np.ascontiguousarray(to_hf(leaf, value))
    return dict(zip(in_files(name, len(array)), array, strict=True)) if is_experts(leaf) else {name: array}


def of_expert(name: str) -> tuple[str, int] | None:
    """Inverse of `in_files`: name of the array and number of the expert; None for any other tensor."""
    match = re.fullmatch(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight)", name)
    return None if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def to_hf(leaf: str, value: np.ndarray) -> np.ndarray:
    """View of a leaf in the orientation of Hugging Face's tensor."""
    if leaf == "embedder.input_embedding" or value.ndim == 1:
        return value
    if is_experts(leaf):
        return value.swapaxes(-1, -2)
    if value.ndim == 3:
        flat = (-1, value.shape[2]) if leaf.endswith("o_proj.w") else (value.shape[0], -1)
        value = value.reshape(flat)
    return value.T


def from_hf(leaf: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Hugging Face tensor ([out, in] for linear layers) in the orientation and shape of the leaf.

    Raises ValueError if the tensor's shape is not that of this leaf.
    """
    expected = to_hf(leaf, np.broadcast_to(np.zeros((), np.int8), shape)).shape
    if tensor.shape != expected:
        raise ValueError(
            f"{hf_name(leaf)} has shape {list(tensor.shape)}, which does not fit the leaf {list(shape)}: expected"
            f" {list(expected)}"
        )
    out = tensor if leaf == "embedder.input_embedding" or tensor.ndim == 1 else tensor.swapaxes(-1, -2)
    return out.reshape(shape)
