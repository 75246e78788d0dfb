"""Folder that an engine is started from, with a normalised config.json.

sglang-jax reads config.json with the transformers of its own environment, in which a key with a newer spelling silently
takes its default. So the engine gets a config.json written from Volley's `ModelConfig`, and links to the weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from shared.errors import ConfigError
from shared.models.config import CONFIG, ModelConfig
from shared.models.weight_files import weight_files

_SPLIT = ("num_attention_heads", "vocab_size")


def check_split(model: ModelConfig, tp_size: int) -> None:
    """Raises ConfigError if the model does not divide over so many devices.

    Key/value heads need not divide: they are repeated if there are fewer.
    """
    sizes = {key: getattr(model, key) for key in _SPLIT} | (
        {"intermediate_size": model.intermediate_size}
        if model.experts is None
        else {"moe_intermediate_size": model.experts.moe_intermediate_size}
    )
    for key, size in sizes.items():
        if size % tp_size:
            raise ConfigError(f"rollout.engine.tp_size={tp_size} does not divide {key}={size}")
    n_kv = model.num_key_value_heads
    if max(tp_size, n_kv) % min(tp_size, n_kv):
        raise ConfigError(f"rollout.engine.tp_size={tp_size} and num_key_value_heads={n_kv}: one must divide the other")


@contextmanager
def normalised(folder: Path, *, weights: bool) -> Iterator[Path]:
    """Yield a temporary folder for the model in `folder`, with or without its `weights`. Raises ConfigError."""
    model = ModelConfig.read(folder)
    with tempfile.TemporaryDirectory(prefix="volley-model-") as temporary:
        (Path(temporary) / CONFIG).write_bytes(orjson.dumps(model.to_hf(), option=orjson.OPT_INDENT_2))
        for i, file in enumerate(weight_files(folder) if weights else ()):
            (Path(temporary) / f"model-{i:05}.safetensors").symlink_to(file.resolve())
        yield Path(temporary)
