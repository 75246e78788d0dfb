"""Weight files of a model folder: exactly those that transformers' `from_pretrained` reads.

These are `model.safetensors`, or else the shards that `model.safetensors.index.json` names. Other files are ignored. A
folder that transformers would read differently, or not at all, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from shared.errors import ConfigError
from shared.files.reading import open_file, read_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNMERGED, SCALE = "unmerged_adapters.safetensors", "scale"
"""File of adapters by the trainer's names, which a rollout server computes beside the weights of its folder, and the
tensor in it with their scale, float32 [] (shared.models.adapter).
"""
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "model.initial_weights"
_LFS_POINTER = b"version https://git-lfs"
_MOST_INDEX_BYTES, _MOST_NAMED, _MOST_ENTRIES = 2**28, 3, 1000

_MERGE = "`volley model get ADAPTERS FOLDER` merges them into their base; name that folder"
_AGAIN = "download it again"
_CONVERT = (
    "convert it: load it with transformers' AutoModelForCausalLM.from_pretrained and write it with save_pretrained"
)
_GGUF = "`volley model get FILE.gguf FOLDER` makes a model's folder of it"
_ORIGINAL = "it is in the original format of the model's authors: take the repository's version for transformers"
_NAMED = f"transformers reads only {WEIGHTS} or the shards that {INDEX} names: if these are the weights, rename it"
_SUFFIXES = {
    ".incomplete": _AGAIN,
    ".part": _AGAIN,
    ".aria2": _AGAIN,
    ".crdownload": _AGAIN,
    ".gguf": _GGUF,
    ".ggml": _GGUF,
    ".safetensors": _NAMED,
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx"), _CONVERT),
}
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "optimizer.bin")
"""Files that trainers write next to weights."""


def weight_files(folder: Path) -> list[Path]:
    """List the files with the model's tensors, sorted. Raises ConfigError naming the file and what to do."""
    if (folder / ADAPTER).is_file():
        raise ConfigError(f"model folder {folder} holds {ADAPTER}: these are adapters of another model", _MERGE)
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        files = _shards(folder)
    else:
        raise _none(folder)
    for file in files:
        _check_pointer(file)
    return files


def check_random(folder: Path) -> None:
    """Check that a model with random weights has no weights in its folder. Raises ConfigError."""
    if (found := next(_candidates(folder), None)) is not None:
        raise ConfigError(
            f"{KEY}=random, but model folder {folder} holds {found[0]}",
            f"say {KEY}=folder to start from its weights; for random weights, copy config.json and the tokenizer's"
            " files to a folder of their own",
        )


def shard_names(folder: Path) -> list[str]:
    """List the shards that the folder's index names, present or not, sorted. Raises ConfigError."""
    index = folder / INDEX
    _check_pointer(index)
    try:
        found: Any = orjson.loads(read_file(index, _MOST_INDEX_BYTES))
        names = sorted({_plain(name) for name in found["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model file {index} is no index of tensors: {error!r}", f"the download is incomplete or damaged: {_AGAIN}"
        ) from error
    if not names:
        raise ConfigError(f"model file {index} is no index of tensors: it names no shard", _AGAIN)
    return names


def _shards(folder: Path) -> list[Path]:
    names = shard_names(folder)
    if absent := [name for name in names if not (folder / name).is_file()]:
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        raise ConfigError(
            f"model folder {folder} lacks {', '.join(absent[:_MOST_NAMED])}{more}, which {INDEX} names",
            f"the download is incomplete: {_AGAIN}",
        )
    return [folder / name for name in names]


def _plain(name: object) -> str:
    """Check that a shard's name stays in the folder. Raises ValueError, or TypeError if it is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of a file")
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name[:100]!r} is not a file of the folder")
    return name


def _check_pointer(file: Path) -> None:
    try:
        with open_file(file) as data:
            start = data.read(len(_LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"model file {file} cannot be read: {error.strerror}", _AGAIN) from error
    if start == _LFS_POINTER:
        raise ConfigError(
            f"model file {file} is a pointer of Git LFS, not the file", "run `git lfs pull` in that folder"
        )


def _none(folder: Path) -> ConfigError:
    found = list(islice(_candidates(folder), _MOST_NAMED))
    names = ", ".join(name for name, _ in found)
    beside = f", only {names}" if found else ", and nothing that looks like weights"
    hint = found[0][1] if found else "name a folder with weights"
    return ConfigError(
        f"model folder {folder} holds no {WEIGHTS} and no {INDEX}{beside}",
        f"{hint}; random weights need {KEY}=random" + (" and a folder that holds no weights" if found else ""),
    )


def _candidates(folder: Path) -> Iterator[tuple[str, str]]:
    """Find files that look like weights, here or one folder below, each with a hint."""
    try:
        entries = sorted(islice(folder.iterdir(), _MOST_ENTRIES))
    except OSError as error:
        raise ConfigError(f"model folder {folder} cannot be read: {error.strerror}") from error
    for entry in (one for one in entries if not one.is_dir()):
        if hint := _looks_like(entry.name):
            yield entry.name if entry.exists() else f"{entry.name} (a broken link)", hint
    for below in (one for one in entries if one.is_dir()):
        pattern = "*/download/*" if below.name == ".cache" else "*"
        for entry in sorted(islice(below.glob(pattern), _MOST_ENTRIES)):
            if hint := _looks_like(entry.name):
                is_download = below.name.startswith(".")
                yield f"{entry.relative_to(folder)}", _AGAIN if is_download else f"try model.path={below}"


def _looks_like(name: str) -> str | None:
    lower = name.lower()
    if lower in _NOT_WEIGHTS:
        return None
    if lower in (INDEX, WEIGHTS):
        return _AGAIN
    if lower.startswith("adapter_"):
        return _MERGE
    if lower.startswith("consolidated"):
        return _ORIGINAL
    if lower.endswith(".index.json"):
        return _CONVERT
    return next((hint for suffix, hint in _SUFFIXES.items() if lower.endswith(suffix)), None)
