"""API keys of external servers, read from files and removed from messages."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.web.access import read_secret


def read_key(path: Path | None, name: str) -> str | None:
    """Read the key in the secret file that `name` of the configuration names; None without one. Raises ConfigError."""
    if path is None:
        return None
    key = read_secret(path, name)
    if not key:
        raise ConfigError(f"{name}: {path} is empty", f"write the key into it, or unset {name}")
    return key


def without_key(text: str, key: str | None) -> str:
    """Remove the key from a server's error message; some servers repeat it."""
    return text.replace(key, "[the key of token_file]") if key else text
