"""Checks of clients' JSON: models, optimizer steps, saved states, as plain values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import InputError

ALPHA = 32.0
"""Scale of adapters: clients choose a rank, and y = x W + (ALPHA / rank) (x A) B."""
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST_RANK = 1024
_LEAST_TTL_S, _MOST_TTL_S = 3600, 10 * 366 * 86400
_MOST_METADATA = 64


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A client's model: adapters of `rank` on the base, or with rank 0 all parameters."""

    base: str
    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True
    unembedding: bool = False

    @property
    def target_modules(self) -> tuple[str, ...]:
        return (_ATTENTION if self.attention else ()) + (_MLP if self.mlp else ())

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "rank": self.rank,
            "seed": self.seed,
            "attention": self.attention,
            "mlp": self.mlp,
            "unembedding": self.unembedding,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelSpec:
        return cls(raw["base"], raw["rank"], raw["seed"], raw["attention"], raw["mlp"], raw["unembedding"])


def model_spec(body: Mapping[str, Any], base: str) -> ModelSpec:
    """Read a create_model. Raises InputError."""
    raw = body.get("lora_config")
    check_optimizer(body.get("optimizer_config"))
    if raw is None:
        return ModelSpec(base, 0, 0)
    if not isinstance(raw, dict):
        raise InputError("lora_config must be an object")
    rank, seed = whole("lora_config.rank", raw.get("rank"), 0, _MOST_RANK), raw.get("seed")
    spec = ModelSpec(
        base,
        rank,
        0 if seed is None else whole("lora_config.seed", seed, 0, 2**63 - 1),
        _flag(raw, "train_attn"),
        _flag(raw, "train_mlp"),
        _flag(raw, "train_unembed"),
    )
    if rank and not spec.target_modules:
        raise InputError(
            "train_attn and train_mlp are both false, and the unembedding gets no adapter here",
            "set one of them, or rank 0 to train all parameters",
        )
    return spec


def check_optimizer(raw: Any) -> None:
    """Raise InputError for another optimizer than AdamW."""
    if raw is not None and (not isinstance(raw, dict) or raw.get("type", "adamw") != "adamw"):
        kind = raw.get("type") if isinstance(raw, dict) else raw
        raise InputError(f"optimizer {str(kind)[:40]!r} is not supported", "use adamw")


def adam(body: Mapping[str, Any]) -> dict[str, float]:
    """Read the settings of an optim_step. Raises InputError."""
    raw = body.get("adam_params")
    if raw is None:
        given = body.get("optimizer_params") or {"type": "none"}
        check_optimizer(given)
        raw = {k: v for k, v in given.items() if k != "type"}
    if not isinstance(raw, dict):
        raise InputError("adam_params must be an object")
    bounds = {
        "learning_rate": (0.0, 1e3),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, 1e3),
        "weight_decay": (0.0, 1e6),
        "grad_clip_norm": (-math.inf, math.inf),
    }
    if unknown := sorted(raw.keys() - bounds.keys() - {"type"}):
        raise InputError(f"adam_params.{unknown[0][:40]} is unknown", f"known: {', '.join(bounds)}")
    found = {}
    for name, (least, most) in bounds.items():
        value = raw.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise InputError(f"adam_params.{name} must be a number from {least:g} to {most:g}, not {str(value)[:40]}")
        if name.startswith("beta") and value >= 1.0 - 2.0**-25:  # 1 in float32
            raise InputError(f"adam_params.{name} must be below 1")
        found[name] = float(value)
    return found


def name(value: Any, default: str) -> str:
    """Read the name of a saved state. Raises InputError."""
    if value is None:
        return default
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(
            f"the name {str(value)[:80]!r} cannot be used",
            "use up to 128 letters, digits, dots, dashes and underscores",
        )
    return value


def ttl(value: Any) -> int | None:
    """Read a time to live in seconds; None for none. Raises InputError."""
    return None if value is None else whole("ttl_seconds", value, _LEAST_TTL_S, _MOST_TTL_S)


def metadata(value: Any) -> dict[str, str] | None:
    """Read metadata of a user. Raises InputError."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _MOST_METADATA:
        raise InputError(f"user_metadata must be an object of at most {_MOST_METADATA} texts")
    return {str(key)[:200]: str(one)[:2000] for key, one in value.items()}


def whole(what: str, value: Any, least: int, most: int) -> int:
    """Read a whole number. Raises InputError."""
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"{what} must be a whole number from {least} to {most}, not {str(value)[:40]}")
    return value


def text(body: Mapping[str, Any], what: str) -> str:
    """Read a text that must be there. Raises InputError."""
    value = body.get(what)
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise InputError(f"{what} must be a text of 1 to 1000 characters")
    return value


def _flag(raw: Mapping[str, Any], what: str) -> bool:
    value = raw.get(what, True)
    if not isinstance(value, bool):
        raise InputError(f"lora_config.{what} must be true or false")
    return value
