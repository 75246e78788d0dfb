"""Names and shapes of weights: Hugging Face's to the engine's, the same for every family. Pure numpy.

| engine                                | Hugging Face                   |
|---------------------------------------|--------------------------------|
| model.embed_tokens.embedding [V, D]   | model.embed_tokens.weight      |
| lm_head.embedding [V, D]              | lm_head.weight                 |
| ….…_proj.weight [in, out]             | ….…_proj.weight, transposed    |
| ….…_proj.bias [out]                   | the same                       |
| …norm.scale [D]                       | …norm.weight                   |
| ….moe_gate.kernel [D, E]              | ….mlp.gate.weight, transposed  |
| ….shared_experts.…_proj.weight         | ….mlp.shared_expert.…_proj.weight, transposed |
| ….mlp.{wi_0,wi_1,wo} [E, in, out]     | ….mlp.experts.0.{gate,up,down}_proj.weight and so on, transposed |

The engine spells some names otherwise for a family: `engine_names` of its record.
A checkpoint whose parameters have Tunix's names is read as what shared.models.names makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from shared.errors import WeightsError
from shared.models import adapter, names
from shared.models.families import families

Shapes = Mapping[str, tuple[int, ...]]
Reads = Mapping[str, Callable[[], np.ndarray]]
_Op = Callable[[np.ndarray], np.ndarray]


def _same(a: np.ndarray) -> np.ndarray:
    return a


def _transposed(a: np.ndarray) -> np.ndarray:
    return a.swapaxes(-1, -2)


_RULES: tuple[tuple[str, str, _Op], ...] = (
    (r"model\.embed_tokens\.weight", "model.embed_tokens.embedding", _same),
    (r"lm_head\.weight", "lm_head.embedding", _same),
    (
        r"(model\.norm|model\.layers\.\d+\.(?:\w+_layernorm|self_attn\.(?:[qk]_norm|\w+_layernorm)))\.weight",
        r"\1.scale",
        _same,
    ),
    (r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight", r"\1.weight", _transposed),
    (r"(model\.layers\.\d+\.self_attn\.\w+_proj)\.bias", r"\1.bias", _same),
    (r"(model\.layers\.\d+)\.mlp\.shared_experts?\.(\w+_proj)\.weight", r"\1.shared_experts.\2.weight", _transposed),
    (r"(model\.layers\.\d+)\.mlp\.(shared_expert_gate)\.weight", r"\1.\2.weight", _transposed),
    (r"(model\.layers\.\d+\.self_attn\.kv_a_proj)_with_mqa\.weight", r"\1.weight", _transposed),
    (r"(model\.layers\.\d+)\.mlp\.gate\.e_score_correction_bias", r"\1.moe_gate.bias", _same),
    (r"(model\.layers\.\d+)\.mlp\.gate\.weight", r"\1.moe_gate.kernel", _transposed),
    (r"(model\.layers\.\d+\.mlp)\.experts\.gate_proj\.weight", r"\1.wi_0", _transposed),
    (r"(model\.layers\.\d+\.mlp)\.experts\.up_proj\.weight", r"\1.wi_1", _transposed),
    (r"(model\.layers\.\d+\.mlp)\.experts\.down_proj\.weight", r"\1.wo", _transposed),
)


def hugging_face(weights: Reads) -> Reads:
    """The arrays of a checkpoint under Hugging Face's names, whichever of the two kinds of names it has; experts in one
    array.

    Raises WeightsError for a name that Tunix has not, among others that it has.
    """
    if not any(names.is_leaf(name) for name in weights):
        return _stacked(weights)
    for name in weights:
        if not names.is_leaf(name):
            raise _no_rule(name)
    return {names.hf_name(name): partial(_as_hugging_face, name, read) for name, read in weights.items()}


def _stacked(weights: Reads) -> Reads:
    """With one array for the experts that have one each. Raises WeightsError where one is missing."""
    found: dict[str, Callable[[], np.ndarray]] = {}
    experts: dict[str, dict[int, Callable[[], np.ndarray]]] = {}
    for name, read in weights.items():
        if (one := names.of_expert(name)) is None:
            found[name] = read
        else:
            experts.setdefault(one[0], {})[one[1]] = read
    for name, of in experts.items():
        if of.keys() != set(range(len(of))):
            raise WeightsError(
                f"{name}: {len(of)} experts are there, others are missing", "the checkpoint is incomplete"
            )
        found[name] = partial(_stack, [of[i] for i in range(len(of))])
    return found


def _stack(reads: Sequence[Callable[[], np.ndarray]]) -> np.ndarray:
    return np.stack([read() for read in reads])


def _as_hugging_face(name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
    return names.to_hf(name, read())


def to_engine(weights: Reads, shapes: Shapes, head_dim: int) -> Iterator[tuple[str, np.ndarray]]:
    """Weights under the engine's names and in its shapes, one at a time in the order of `weights`: files are read from
    their beginning to their end.

    Args:
        weights: makes each of the checkpoint's arrays, by its flat name: Hugging Face's or Tunix's.
        shapes: the engine's own leaves; exactly these are yielded.
        head_dim: size of one attention head; key and value heads are repeated in place where the engine splits its
            tensor axis over more devices than the model has such heads.

    Raises:
        WeightsError: a name without a rule, a leaf missing or left over (then no array is made), or a different shape.
    """
    renamed = hugging_face(weights)
    found = {target: (name, change) for name in renamed for target, change in (_rule(name, shapes),)}
    if (
        not any(names.is_leaf(name) for name in weights) and "lm_head.embedding" not in shapes
    ):  # Hugging Face's may hold the tied one a second time
        found.pop("lm_head.embedding", None)
    missing, extra = sorted(set(shapes) - set(found)), sorted(set(found) - set(shapes))
    if missing or extra:
        raise WeightsError(
            f"the checkpoint's tree differs from the model's: missing {missing[:3]}, not in the model {extra[:3]}"
        )
    for target, (name, change) in found.items():
        yield target, _fit(target, change(renamed[name]()), tuple(shapes[target]), head_dim)


def to_adapters(
    weights: Reads, shapes: Shapes, head_dim: int
) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Adapters by the engine's names of their weights; each is read as A [in, rank] and B [rank, out].

    Args:
        weights: reads the arrays by the trainer's names (shared.models.adapter).
        shapes, head_dim: as in `to_engine`.

    Raises WeightsError for an A without its B or the reverse, and for an adapter of a weight that the model lacks; the
    readers raise it for shapes that do not fit.
    """
    found = adapter.weights_of(weights)
    if wrong := sorted(set(weights) ^ {one(name) for name in found for one in (adapter.a_name, adapter.b_name)}):
        raise WeightsError(f"{wrong[0]} is half of an adapter", "an adapter needs both its matrices, A and B")
    for name in found:
        target = _rule(names.hf_name(name), shapes)[0] if names.is_leaf(name) else name
        if len(shapes.get(target, ())) != 2:
            raise WeightsError(f"{name} is not an adapter of this base", "load adapters that were trained on it")
        a, b = weights[adapter.a_name(name)], weights[adapter.b_name(name)]
        yield target, partial(_adapter, target, a, b, shapes[target], head_dim)


def _adapter(
    name: str, a: Callable[[], np.ndarray], b: Callable[[], np.ndarray], shape: Sequence[int], head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    first, second = a(), b()
    first, second = first.reshape(-1, first.shape[-1]), second.reshape(second.shape[0], -1)
    rank = second.shape[0]
    if first.shape != (shape[0], rank):
        raise WeightsError(f"{list(first.shape)} and {list(second.shape)} are not an adapter of {name} {list(shape)}")
    return first, _fit(name, second, (rank, shape[1]), head_dim)


def _rule(name: str, shapes: Shapes) -> tuple[str, _Op]:
    """The engine's name of a tensor, and what is done to the array."""
    for pattern, target, change in _RULES:
        if match := re.fullmatch(pattern, name):
            called = match.expand(target)
            respelled = (
                called.replace(*part) for family in families().values() for part in family.engine_names.items()
            )
            return next((one for one in (called, *respelled) if one in shapes), called), change
    raise _no_rule(name)


def _no_rule(name: str) -> WeightsError:
    return WeightsError(
        f"weight {name} is unknown", "the model's family is not supported, or the checkpoint has another layout"
    )


def _fit(name: str, value: np.ndarray, shape: tuple[int, ...], head_dim: int) -> np.ndarray:
    if value.shape == shape:
        return value
    repeats, rest = divmod(shape[-1], value.shape[-1])
    if re.search(r"\.[kv]_proj\.(weight|bias)$", name) and value.shape[:-1] == shape[:-1] and rest == 0:
        return np.repeat(value.reshape(*value.shape[:-1], -1, head_dim), repeats, axis=-2).reshape(shape)
    raise WeightsError(f"{name} has shape {list(value.shape)}, but the model needs {list(shape)}")
