"""The folder an engine is started from: the model as this project understands it, in the one spelling that the engine
reads.

sglang-jax reads config.json by itself, with the transformers of its own environment: a key that is spelled in a newer
way is silently a default there. So it gets a config.json that is written from the normalised description, and of the
model's own folder only the weights.
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
    """Raises ConfigError if the model does not divide over so many devices. Heads of keys and values need not: they are
    repeated where there are fewer.
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
        raise ConfigError(f"of rollout.engine.tp_size={tp_size} and num_key_value_heads={n_kv} none divides the other")


@contextmanager
def normalised(folder: Path, *, weights: bool) -> Iterator[Path]:
    """A temporary folder that stands for the model in `folder`, with its `weights` or without. Raises ConfigError."""
    model = ModelConfig.read(folder)
    with tempfile.TemporaryDirectory(prefix="volley-model-") as temporary:
        (Path(temporary) / CONFIG).write_bytes(orjson.dumps(model.to_hf(), option=orjson.OPT_INDENT_2))
        for i, file in enumerate(weight_files(folder) if weights else ()):
            (Path(temporary) / f"model-{i:05}.safetensors").symlink_to(file.resolve())
        yield Path(temporary)
