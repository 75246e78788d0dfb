"""Names of low-rank adapters (LoRA, Hu et al., 2021), and how they are merged into their base.

The effective weight is W + (alpha / rank) · A B, with A [in…, rank] and B [rank, out…] for a weight W [in…, out…] of
the trainer. Names are those of qwix (`….w_lora_a`, `….kernel_lora_a`) and of PEFT. `volley export` writes the output of
`merged`; the engine computes with base and adapters, unmerged as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shared.models.names import hf_name

_A, _B = "_lora_a", "_lora_b"
_PEFT = {_A: "lora_A", _B: "lora_B"}

type Reads = Mapping[str, Callable[[], np.ndarray]]
"""Functions that read each array, by name."""


def a_name(weight: str) -> str:
    """layers.0.attn.q_proj.w -> layers.0.attn.q_proj.w_lora_a"""
    return weight + _A


def b_name(weight: str) -> str:
    """layers.0.attn.q_proj.w -> layers.0.attn.q_proj.w_lora_b"""
    return weight + _B


def is_adapter(name: str) -> bool:
    """True for the name of an A or a B."""
    return name.endswith((_A, _B))


def is_b(name: str) -> bool:
    """True for the name of a B, which is 0 where an adapter changes nothing."""
    return name.endswith(_B)


def weights_of(names: Iterable[str]) -> list[str]:
    """Names of the weights that these adapters belong to, sorted."""
    return sorted({name.removesuffix(_A).removesuffix(_B) for name in names if is_adapter(name)})


def merge(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Compute W + scale · A B, float32: in bfloat16 the sum would lose most of a small change.

    Raises ValueError if the shapes do not fit.
    """
    if a.shape[-1] != b.shape[0] or (*a.shape[:-1], *b.shape[1:]) != weight.shape:
        raise ValueError(f"{list(a.shape)} and {list(b.shape)} are not an adapter of a weight {list(weight.shape)}")
    delta = np.tensordot(np.asarray(a, np.float32), np.asarray(b, np.float32), 1)
    return weight.astype(np.float32) + np.float32(scale) * delta


def merged(base: Reads, adapter: Reads, scale: float) -> dict[str, Callable[[], np.ndarray]]:
    """Readers of every weight of the base, with its adapter merged, in float32, if it has one.

    Raises ValueError for an A without its B or the reverse, and for an adapter of a weight that the base lacks; the
    readers raise it for shapes that do not fit.
    """
    adapted = weights_of(adapter)
    expected = {name for weight in adapted for name in (a_name(weight), b_name(weight))}
    if wrong := sorted((expected ^ set(adapter)) | (set(adapted) - set(base))):
        raise ValueError(f"{wrong[0]} is not an adapter of this base")
    made = dict(base)
    for weight in adapted:
        made[weight] = partial(_merged, base[weight], adapter[a_name(weight)], adapter[b_name(weight)], scale)
    return made


def _merged(
    weight: Callable[[], np.ndarray], a: Callable[[], np.ndarray], b: Callable[[], np.ndarray], scale: float
) -> np.ndarray:
    return merge(weight(), a(), b(), scale)


def merged_arrays(base: Mapping[str, np.ndarray], adapter: Mapping[str, Any], scale: float) -> dict[str, np.ndarray]:
    """Same as `merged`, on arrays."""
    reads = merged(
        {k: partial(np.asarray, v) for k, v in base.items()},
        {k: partial(np.asarray, v) for k, v in adapter.items()},
        scale,
    )
    return {name: read() for name, read in reads.items()}


def peft(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and array as PEFT saves them: lora_A [rank, in], lora_B [out, rank]."""
    (weight,) = weights_of([name])
    suffix = _B if is_b(name) else _A
    module = hf_name(weight).removesuffix(".weight")
    flat = value.reshape(value.shape[0], -1) if suffix == _B else value.reshape(-1, value.shape[-1])
    return f"base_model.model.{module}.{_PEFT[suffix]}.weight", np.ascontiguousarray(flat.T)
