"""Rotary positions: θ and scaling from every spelling of a config.json, and their frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from shared.errors import ConfigError
from shared.models.family import FULL, SLIDING
from shared.models.values import number, shorten, unsupported

MAX_THETA = 1e30
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_OWN_THETA = "rope_parameters.rope_theta"
_HINT = "supported are plain rotary positions, and Llama 3's scaling for Llama models"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of frequencies.

    Frequencies with wavelengths above `original_max_position_embeddings / low_freq_factor` tokens are divided by
    `factor`; those below `… / high_freq_factor` stay; between the two is a blend.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def to_hf(self) -> dict[str, Any]:
        """Write `rope_scaling`."""
        return {"rope_type": "llama3", **asdict(self)}


def frequencies(theta: float, head_dim: int, scaling: Llama3Scaling | None) -> np.ndarray:
    """Frequencies of each pair of a head's numbers: float64 [head_dim / 2], radians per position.

    Scaled as in transformers' `_compute_llama3_parameters`.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def flattened(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Replace `rope_parameters` by type of layer, as transformers 5 writes them, with those of transformers 4.

    θ of sliding layers becomes `rope_local_base_freq`, beside `rope_parameters` of full layers. Raises ConfigError.
    """
    by_type = raw.get("rope_parameters")
    if by_type is None:
        return raw
    if not isinstance(by_type, dict) or set(entries := cast(dict[str, Any], by_type)) - {FULL, SLIDING}:
        raise unsupported("rope_parameters", by_type, where)
    found = {**raw, "rope_parameters": entries.get(FULL)}
    sliding = entries.get(SLIDING) or {}
    if not isinstance(sliding, dict):
        raise unsupported(f"rope_parameters.{SLIDING}", sliding, where)
    local = cast(dict[str, Any], sliding)
    _scaling(local, f"rope_parameters.{SLIDING}", where, llama3=False)
    if "rope_theta" in local:
        given = raw.get("rope_local_base_freq", local["rope_theta"])
        if given != local["rope_theta"]:
            raise ConfigError(
                f"{where} gives several values of rope_local_base_freq: {shorten(given)}, and"
                f" {shorten(local['rope_theta'])} in rope_parameters.{SLIDING}",
                "keep the one that the weights were trained with",
            )
        found["rope_local_base_freq"] = local["rope_theta"]
    return found


def parse(
    raw: Mapping[str, Any], where: str, *, llama3: bool, default: float = 10_000.0
) -> tuple[float, Llama3Scaling | None]:
    """Read θ and scaling; with `llama3` Llama 3's scaling is accepted. Raises ConfigError naming the key.

    transformers 4 writes them at the top and in `rope_scaling`, transformers 5 in `rope_parameters`.
    """
    thetas: dict[str, float] = {}
    scalings: set[Llama3Scaling | None] = set()
    if "rope_theta" in raw:
        thetas["rope_theta"] = number(raw["rope_theta"], "rope_theta", where, MAX_THETA)
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise unsupported(name, rope, where)
        entries = cast(dict[str, Any], rope)
        if "rope_theta" in entries:
            thetas[f"{name}.rope_theta"] = number(entries["rope_theta"], f"{name}.rope_theta", where, MAX_THETA)
        scalings.add(_scaling(entries, name, where, llama3=llama3))
    if len(scalings) > 1:
        raise ConfigError(
            f"{where}: rope_scaling and rope_parameters differ",
            "keep the one that the weights were trained with",
        )
    if len(set(thetas.values())) > 1:
        listed = ", ".join(f"{key}={value:g}" for key, value in thetas.items())
        raise ConfigError(
            f"{where} gives several values of θ: {listed}", "keep the one that the weights were trained with"
        )
    if raw.get("rope_scaling") and thetas.keys() == {_OWN_THETA} and thetas[_OWN_THETA] != default:
        raise ConfigError(
            f"{where}: {_OWN_THETA}={thetas[_OWN_THETA]:g} has no effect in transformers, which leaves"
            " rope_parameters out beside rope_scaling",
            "remove rope_scaling, or write rope_theta beside it",
        )
    length = raw.get(_LLAMA3[-1])
    if length is not None and any(one and one.original_max_position_embeddings != length for one in scalings):
        raise ConfigError(
            f"{where}: {_LLAMA3[-1]}={shorten(length)} is not that of the scaling",
            "keep the one that the weights were trained with",
        )
    return next(iter(thetas.values()), default), next(iter(scalings), None)


def _scaling(rope: Mapping[str, Any], name: str, where: str, *, llama3: bool) -> Llama3Scaling | None:
    kinds = {key: rope[key] for key in ("rope_type", "type") if key in rope}
    if llama3 and kinds and all(kind == "llama3" for kind in kinds.values()):
        return _llama3(rope, name, where)
    for key, value in (kinds | dict(rope)).items():  # the kind first: the other keys follow from it
        if key != "rope_theta" and not (key in kinds and value == "default") and not _whole_head(key, value):
            raise unsupported(f"{name}.{key}", value, where)
    return None


def _whole_head(key: str, value: object) -> bool:
    return key == "partial_rotary_factor" and value == 1


def _llama3(rope: Mapping[str, Any], name: str, where: str) -> Llama3Scaling:
    for key, value in rope.items():
        if key not in (*_LLAMA3, "rope_type", "type", "rope_theta") and not _whole_head(key, value):
            raise unsupported(f"{name}.{key}", value, where)
    if missing := [key for key in _LLAMA3 if key not in rope]:
        raise ConfigError(f"{where}: {name} lacks {', '.join(missing)}", "rope_type llama3 needs all four numbers")
    factor, low, high, length = (number(rope[key], f"{name}.{key}", where, 1 << 30) for key in _LLAMA3)
    if high <= low:
        raise ConfigError(
            f"{where}: {name}.high_freq_factor={high:g} is not above low_freq_factor={low:g}", "correct them"
        )
    if length != int(length):
        raise unsupported(f"{name}.original_max_position_embeddings", length, where)
    return Llama3Scaling(factor, low, high, int(length))
