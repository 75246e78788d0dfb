"""Digests of the files in a model's folder that decide texts and token ids.

The first start of a run records them as `model.content`, and each later start compares. The folder's path does not
count, and files are compared byte by byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.schema import RunConfig

KEY = "model.content"
_MAX_BYTES = 2**30
NONE = "none"
"""Stands for the digest of a missing file."""
_FILES = {
    "config": "config.json",
    "generation_config": "generation_config.json",
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "special_tokens_map": "special_tokens_map.json",
    "added_tokens": "added_tokens.json",
    "chat_template": "chat_template.jinja",
    "additional_chat_templates": "additional_chat_templates/*.jinja",
}
"""Files by their name in `model.content`, which has no dot."""


def digests(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of each file, or of the names and contents of several. Raises ConfigError."""
    return {name: _digest(folder, pattern) for name, pattern in _FILES.items()}


def _digest(folder: Path, pattern: str) -> str:
    if "*" not in pattern:
        return _of_file(folder / pattern)
    found = [f"{path.name}\0{_of_file(path)}\n" for path in sorted(folder.glob(pattern))]
    return hashlib.sha256("".join(found).encode("utf-8", "surrogateescape")).hexdigest() if found else NONE


def _of_file(path: Path) -> str:
    try:
        return hashlib.sha256(read_file(path, _MAX_BYTES)).hexdigest()
    except FileNotFoundError:
        return NONE
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror}", "make it readable") from error


def check(recorded: Mapping[str, str], now: Mapping[str, str], folder: str | Path) -> None:
    """Raise ConfigError naming the files that differ, with both digests. A file without a recorded digest is new to
    this version.
    """
    differing = [
        f"{_FILES[name]} (sha256 was {recorded[name]}, is {digest})"
        for name, digest in now.items()
        if recorded.get(name, digest) != digest
    ]
    if differing:
        raise ConfigError(
            f"model folder {folder} differs from the one that the run began with: {', '.join(differing)} changed",
            "put the files back as they were, or start another run from the trained weights: run.name=…"
            " model.path=RUN@VERSION",
        )


def with_content(config: RunConfig, folder: Path) -> RunConfig:
    """Add the digests of the model's folder to the configuration of a starting service.

    Raises ConfigError if the configuration has other digests.
    """
    now = digests(folder)
    check(config.model.content or {}, now, folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"content": now})})
