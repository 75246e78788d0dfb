"""Merge the adapters of a PEFT folder into their base: `python -m volley_convert.merging ADAPTERS FOLDER`.

`volley model get` runs it. The folder holds the base's files, the tokenizer of the adapters' folder if it has one, and
the weights W + scale · B A as PEFT computes them. Merged weights are float32, because bfloat16 would round away most of
a small change; all others stay as they are.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from services.trainer.models.initial_weights import places_of
from shared.errors import ConfigError, VolleyError, problem
from shared.models import adapter, hub
from shared.models.config import CONFIG, ModelConfig
from shared.models.weight_files import ADAPTER, ADAPTER_WEIGHTS, WEIGHTS, weight_files

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
}
"""Keys that change how adapters are computed, with the values under which they do not."""
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja")


def merge(adapters: Path, folder: Path) -> Path:
    """Write the folder; return the base's. Raises ConfigError for adapters of another kind or another base."""
    config = _config(adapters)
    base = base_of(config, adapters)
    pairs = _pairs(adapters / ADAPTER_WEIGHTS)
    tensors: dict[str, np.ndarray] = {}
    for name, place in places_of(weight_files(base)).items():
        value = place.mapped()
        if (pair := pairs.pop(name.removesuffix(".weight"), None)) is not None:
            value = _merged(name, value, pair, config, base)
        tensors[name] = value
    if pairs:
        raise ConfigError(
            f"{adapters} adapts {min(pairs)}, which its base {base} does not have",
            "they are adapters of another model: correct base_model_name_or_path",
        )
    folder.mkdir(parents=True, exist_ok=True)
    hub.copy_small(base, folder)
    if (adapters / "tokenizer.json").is_file():
        for pattern in _TOKENIZER:
            for file in adapters.glob(pattern):
                (folder / file.name).write_bytes(file.read_bytes())
    described = orjson.loads((folder / CONFIG).read_bytes())
    described = {key: value for key, value in described.items() if key not in ("dtype", "torch_dtype")}
    dtype = np.result_type(*(value.dtype for value in tensors.values())).name
    (folder / CONFIG).write_bytes(orjson.dumps(described | {"torch_dtype": dtype}, option=orjson.OPT_INDENT_2))
    ModelConfig.read(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return base


def base_of(config: Mapping[str, Any], adapters: Path) -> Path:
    """Find the base: a path, also from the adapters' folder, a folder of `models/`, or a hub id. Raises ConfigError."""
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{adapters / ADAPTER} names no base_model_name_or_path", "add the path of the base")
    for folder in (Path(named), adapters / named, Path("models") / Path(named).name):
        if (folder / CONFIG).is_file():
            return folder
    try:
        return hub.model_folder(named, weights=True)
    except ConfigError as error:
        raise ConfigError(
            f"the base {named} of {adapters} is not here: {error.detail}",
            f"`volley model get` brings it: name the folder models/{Path(named).name}, or correct {ADAPTER}",
        ) from error


def _config(adapters: Path) -> dict[str, Any]:
    file = adapters / ADAPTER
    try:
        found = orjson.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}", "name the folder that PEFT's save_pretrained wrote"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no JSON object", "name the folder that PEFT's save_pretrained wrote")
    for key, neutral in _NEUTRAL.items():
        if found.get(key, neutral[0]) not in neutral:
            raise ConfigError(f"{file}: {key}={found[key]!r} is not merged", "merge it with PEFT: merge_and_unload")
    return found


def _pairs(file: Path) -> dict[str, dict[str, np.ndarray]]:
    """A [rank, in] and B [out, rank], float32, of each adapted module. Raises ConfigError."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, place in places_of([file]).items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise ConfigError(f"{file} holds {name}, which is no adapter of a projection", "merge it with PEFT")
        found.setdefault(match[1], {})[match[2]] = place.mapped().astype(np.float32)
    if incomplete := next((name for name, pair in found.items() if len(pair) < 2), None):
        raise ConfigError(f"{file} lacks lora_A or lora_B of {incomplete}", "download it again")
    if not found:
        raise ConfigError(f"{file} holds no adapters", "download it again")
    return found


def _merged(
    name: str, value: np.ndarray, pair: Mapping[str, np.ndarray], config: Mapping[str, Any], base: Path
) -> np.ndarray:
    """W + scale · B A, where the scale is lora_alpha / r, or lora_alpha / √r with `use_rslora`. Raises ConfigError."""
    module = name.removesuffix(".weight")
    try:
        rank, alpha = (_own(config, key, module) for key in ("r", "lora_alpha"))
        if len(pair["A"]) != rank:
            raise ValueError(f"have the rank {len(pair['A'])}, but {ADAPTER} says {rank}")
        return adapter.merge(
            value, pair["B"], pair["A"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        )
    except (ValueError, TypeError, IndexError, ZeroDivisionError, re.error) as error:
        raise ConfigError(
            f"B and A of {name} in {base}: {error}",
            f"are they adapters of another model? base_model_name_or_path in {ADAPTER} names the base",
        ) from error


def _own(config: Mapping[str, Any], key: str, module: str) -> float:
    """Value of a module: that of the first pattern that its name ends with, or else that of all."""
    patterns = config.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[key]) or {}
    own = (value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", module))
    return next(own, config.get(key, 8))


def main(arguments: list[str]) -> int:
    """Print the result or a problem as a JSON object; return the exit code."""
    try:
        base = merge(Path(arguments[0]), Path(arguments[1]))
    except VolleyError as error:
        _print_json(problem(error))
        return 2
    _print_json({"ok": True, "base": str(base)})
    return 0


def _print_json(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
