"""Files of rules that a configuration names; a package reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared import packages
from shared.own_rules import CREDIT, CREDITS, KEYS, is_text


def found_beside(tree: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the rules of a configuration file whose files lie beside it and not in the present directory, by key."""
    found: dict[str, str] = {}
    for key, value in _named(tree).items():
        path, _, _ = value.rpartition(":")
        if path.endswith(".py") and "${" not in path and not Path(path).exists() and (folder / path).exists():
            found[key] = str((folder / value).absolute())
    return found


def resolved(tree: Mapping[str, Any], base: Path) -> dict[str, str]:
    """Return the texts of the rules that a configuration names, by key. Raises ConfigError.

    Args: base: folder for relative paths and the first place to look for modules.
    """
    if not (named := _named(tree)):
        return {}
    read: Callable[[str, str, Path], str] = packages.part("rule_text")
    return {key: read(key, value, base) for key, value in named.items()}


def replaced(tree: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with these values, by key."""
    made = dict(tree)
    for key, value in values.items():
        top, _, rest = key.partition(".")
        made[top] = replaced(made[top], {rest: value}) if rest else value
    return made


def _named(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of rules in a configuration, by key."""
    values = {key: _value(tree, key) for key in KEYS}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, str) and not is_text(value) and not (key == CREDIT and value in CREDITS)
    }


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
