"""Where a model lies: a local folder as it is, anything else as a Hugging Face hub id."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError

_SMALL = ["*.json", "*.jinja", "*.txt"]


def model_folder(path: str, *, weights: bool = False) -> Path:
    """The folder of `path`; a hub id is downloaded (config and tokenizer, with `weights` also safetensors).

    Raises ConfigError if it is neither a folder nor a repository that can be reached.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder.resolve()
    if path.startswith((".", "/")) or path.count("/") != 1:
        raise ConfigError(f"model.path {path} is no folder", "give a Hugging Face folder or a hub id like Qwen/Qwen3-4B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=[*_SMALL, "*.safetensors"] if weights else _SMALL))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path} is no folder and could not be downloaded: {type(error).__name__}", "check the name and the network"
        ) from error
