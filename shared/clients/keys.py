"""Keys of servers that are not of this project: read from their files, and never said back."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.web.access import read_secret


def read_key(path: Path | None, name: str) -> str | None:
    """The key in the secret file that `name` of the configuration names; None without one. Raises ConfigError."""
    if path is None:
        return None
    key = read_secret(path, name)
    if not key:
        raise ConfigError(f"{name}: {path} is empty", f"write the key into it, or unset {name}")
    return key


def without_key(text: str, key: str | None) -> str:
    """What a server says of an error, without our key: some say it back."""
    return text.replace(key, "[the key of token_file]") if key else text
