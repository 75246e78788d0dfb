"""Which tensors of a Hugging Face Qwen3 our parameters are. No JAX here."""

from __future__ import annotations

import re

import numpy as np

_BLOCK = {
    "attn.q_proj.w": "self_attn.q_proj",
    "attn.k_proj.w": "self_attn.k_proj",
    "attn.v_proj.w": "self_attn.v_proj",
    "attn.o_proj.w": "self_attn.o_proj",
    "attn.q_norm.w": "self_attn.q_norm",
    "attn.k_norm.w": "self_attn.k_norm",
    "mlp.gate_proj.kernel": "mlp.gate_proj",
    "mlp.up_proj.kernel": "mlp.up_proj",
    "mlp.down_proj.kernel": "mlp.down_proj",
    "input_layernorm.w": "input_layernorm",
    "post_attention_layernorm.w": "post_attention_layernorm",
}
_TOP = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
}


def hf_name(leaf: str) -> str:
    """The Hugging Face tensor of a parameter leaf: layers.0.attn.q_proj.w -> model.layers.0.self_attn.q_proj.weight."""
    if leaf in _TOP:
        return _TOP[leaf]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", leaf)
    if match is None or match[2] not in _BLOCK:
        raise KeyError(leaf)
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"


def from_hf(leaf: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A Hugging Face tensor ([out, in] for linear layers) in the orientation and shape of the leaf.

    Raises ValueError if the sizes do not fit.
    """
    out = tensor if leaf == "embedder.input_embedding" or tensor.ndim == 1 else tensor.T
    if out.size != np.prod(shape) or (out.ndim == len(shape) and out.shape != shape):
        raise ValueError(f"{hf_name(leaf)} has shape {list(tensor.shape)}, which does not make {list(shape)}")
    return out.reshape(shape)
