"""Download a model from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.models.weight_files import INDEX, WEIGHTS, shard_names
from shared.visible import quoted


def download(path: str, small: Sequence[str], weights: bool) -> Path:
    """Return the folder of a hub id with the files that match `small`, and weights if wanted. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = Path(snapshot_download(path, allow_patterns=[*small, WEIGHTS] if weights else list(small)))
        if weights and not (found / WEIGHTS).is_file() and (found / INDEX).is_file():
            snapshot_download(path, allow_patterns=[*small, *shard_names(found)])
        return found
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path} is no folder, and {_why(error)}",
            _hint(path),
        ) from error


def _why(error: Exception) -> str:
    """Say why huggingface.co gave no model."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be downloaded: huggingface.co does not answer, and no copy is kept here"
    if isinstance(error, GatedRepoError):
        return "huggingface.co gives it only to accounts that were admitted (HF_TOKEN names one)"
    if isinstance(error, RepositoryNotFoundError):
        return "huggingface.co has no model of that name"
    return f"it could not be downloaded: {type(error).__name__}"


def _hint(path: str) -> str:
    if "smollm2" in path.lower():
        return f"`volley model get smollm2 {quoted(path)}` makes this folder"
    return f"check the name and the network; if {path} is a folder, give its whole path"
