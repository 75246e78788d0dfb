"""Settings of a configuration as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.hints import renamed


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as `key.path=value`: a mapping holds keys of the section before it.

    `trainer={"max_steps": 8}`, `trainer__max_steps=8` and `**{"trainer.max_steps": 8}` say the same. Raises ConfigError
    for a value that a configuration file cannot hold.
    """
    for name in settings:
        if (found := renamed(name)) and (instead := _argument(found[1])):
            raise ConfigError(f"{name} is an argument of {found[0]}", instead)
    return list(_flat(settings, ""))


def _argument(text: str) -> str | None:
    """Say which argument of `volley.train` to write, from a text of `shared.hints.renamed`; None for a setting."""
    if text == "model.path" or text.startswith("--"):
        return f"write {'model' if text == 'model.path' else text[2:].replace('-', '_')}=…"
    return text if text.startswith("write ") else None


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in settings.items():
        name = f"{prefix}{key.replace('__', '.')}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
            continue
        try:
            yield f"{name}={json.dumps(str(value) if isinstance(value, Path) else value)}"
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise ConfigError(f"{name} is a {kind}", "use numbers, strings, lists and dicts") from error
