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

from shared.models.config import CONFIG, ModelConfig

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@contextmanager
def normalised(folder: Path) -> Iterator[Path]:
    """A temporary folder that stands for the model in `folder`. Raises ConfigError."""
    model = ModelConfig.read(folder)
    with tempfile.TemporaryDirectory(prefix="volley-model-") as temporary:
        (Path(temporary) / CONFIG).write_bytes(orjson.dumps(model.to_hf(), option=orjson.OPT_INDENT_2))
        for pattern in _WEIGHTS:
            for file in folder.glob(pattern):
                (Path(temporary) / file.name).symlink_to(file.resolve())
        yield Path(temporary)
