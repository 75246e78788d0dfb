"""Names and shapes of weights: Tunix's Qwen3 layout and Hugging Face's, to the engine's. Pure numpy.

| engine                              | Hugging Face                 | Tunix                                  |
|-------------------------------------|------------------------------|----------------------------------------|
| model.embed_tokens.embedding [V, D] | same                         | embedder.input_embedding [V, D]        |
| lm_head.embedding [V, D]            | same                         | lm_head.w [D, V]                       |
| self_attn.{q,k,v}_proj.weight [D, HK]| transposed                  | attn.{q,k,v}_proj.w [D, H, K]          |
| self_attn.o_proj.weight [HK, D]     | transposed                   | attn.o_proj.w [H, K, D]                |
| mlp.*_proj.weight [in, out]         | transposed                   | mlp.*_proj.kernel [in, out]            |
| *norm.scale                         | *norm.weight                 | *norm.w                                |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from shared.errors import WeightsError

Shapes = Mapping[str, tuple[int, ...]]
_Op = Callable[[np.ndarray], np.ndarray]


def _same(a: np.ndarray) -> np.ndarray:
    return a


def _transposed(a: np.ndarray) -> np.ndarray:
    return a.T


def _merge_last(a: np.ndarray) -> np.ndarray:
    return a.reshape(a.shape[0], -1)


def _merge_first(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, a.shape[-1])


_LAYER = r"layers\.(\d+)\."
_TUNIX: tuple[tuple[str, str, _Op], ...] = (
    (r"embedder\.input_embedding", "model.embed_tokens.embedding", _same),
    (r"final_norm\.w", "model.norm.scale", _same),
    (r"lm_head\.w", "lm_head.embedding", _transposed),
    (_LAYER + r"(input_layernorm|post_attention_layernorm)\.w", r"model.layers.\1.\2.scale", _same),
    (_LAYER + r"attn\.(q_norm|k_norm)\.w", r"model.layers.\1.self_attn.\2.scale", _same),
    (_LAYER + r"attn\.([qkv]_proj)\.w", r"model.layers.\1.self_attn.\2.weight", _merge_last),
    (_LAYER + r"attn\.o_proj\.w", r"model.layers.\1.self_attn.o_proj.weight", _merge_first),
    (_LAYER + r"mlp\.(gate_proj|up_proj|down_proj)\.kernel", r"model.layers.\1.mlp.\2.weight", _same),
)
_HF: tuple[tuple[str, str, _Op], ...] = (
    (r"model\.embed_tokens\.weight", "model.embed_tokens.embedding", _same),
    (r"lm_head\.weight", "lm_head.embedding", _same),
    (r"(model\.norm|model\.layers\.\d+\.(?:\w+_layernorm|self_attn\.[qk]_norm))\.weight", r"\1.scale", _same),
    (r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight", r"\1.weight", _transposed),
)


def to_engine(
    weights: Mapping[str, Callable[[], np.ndarray]], shapes: Shapes, kind: str, head_dim: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Weights under the engine's names and in its shapes, one at a time in the order of `shapes`.

    Args:
        weights: makes each of the checkpoint's arrays, by its flat name of `kind` ("orbax": Tunix's layout, "hf":
            Hugging Face's).
        shapes: the engine's own leaves; exactly these are yielded.
        head_dim: size of one attention head; key and value heads are repeated in place where the engine splits its
            tensor axis over more devices than the model has such heads.

    Raises:
        WeightsError: a name without a rule, a leaf missing or left over (then no array is made), or a different shape.
    """
    rules = _TUNIX if kind == "orbax" else _HF
    found = {target: (name, change) for name in weights for target, change in (_rule(name, rules),)}
    if kind == "hf" and "lm_head.embedding" not in shapes:
        found.pop("lm_head.embedding", None)
    missing, extra = sorted(set(shapes) - set(found)), sorted(set(found) - set(shapes))
    if missing or extra:
        raise WeightsError(
            f"the checkpoint's tree differs from the model's: missing {missing[:3]}, not in the model {extra[:3]}"
        )
    for target, shape in shapes.items():
        name, change = found[target]
        yield target, _fit(target, change(weights[name]()), tuple(shape), head_dim)


def _rule(name: str, rules: tuple[tuple[str, str, _Op], ...]) -> tuple[str, _Op]:
    """The engine's name of a leaf, and what is done to the array."""
    for pattern, target, change in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(target), change
    raise WeightsError(
        f"no rule for the weight {name}", "the model family is not Qwen3, or the checkpoint is of another layout"
    )


def _fit(name: str, value: np.ndarray, shape: tuple[int, ...], head_dim: int) -> np.ndarray:
    if value.shape == shape:
        return value
    repeats, rest = divmod(shape[-1], value.shape[-1])
    if re.search(r"\.[kv]_proj\.weight$", name) and value.shape[:-1] == shape[:-1] and rest == 0:
        return np.repeat(value.reshape(*value.shape[:-1], -1, head_dim), repeats, axis=-2).reshape(shape)
    raise WeightsError(f"{name} has shape {list(value.shape)}, the model wants {list(shape)}")
