"""Keys of older configurations that this version, or this installation, lacks.

Every run records all settings with their defaults, so that a key outlives its removal in the runs that had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shared import packages
from shared.errors import ConfigError


class RemovedKey(NamedTuple):
    """`successor` replaced the key; its `neutral` values, and null, had no effect."""

    successor: str
    neutral: tuple[Any, ...]

    def is_neutral(self, value: Any) -> bool:
        return value is None or value in self.neutral


REMOVED: Mapping[str, RemovedKey] = {
    "orchestrator.generation.filters.custom": RemovedKey("trainer.filters.custom", ([],)),
}


def without(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key without removed keys that had no effect."""
    return {key: value for key, value in flat.items() if key not in REMOVED or not REMOVED[key].is_neutral(value)}


def readable(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings as this version reads them: without removed keys that had no effect.

    Raises ConfigError for a removed key that had one, and for a key of a package that is not installed.
    """
    found = without(flat)
    for key, value in found.items():
        if key in REMOVED:
            successor = REMOVED[key].successor
            raise ConfigError(
                f"the run records {key}={str(value)[:200]}, which this version cannot apply: {successor} replaced it",
                f"start a new run with {successor}=… from its weights: model.path=RUN@VERSION",
            )
        if absent := packages.missing(key.partition(".")[0]):
            raise ConfigError(f"the run records {key}: {absent}", "install it")
    return found


def without_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration without removed keys that have no effect."""
    found = dict(tree)
    for key, removed in REMOVED.items():
        *parents, leaf = key.split(".")
        node: Any = found
        for parent in parents:
            inner = node.get(parent)
            if not isinstance(inner, dict):
                break
            node[parent] = node = dict(inner)
        else:
            if leaf in node and removed.is_neutral(node[leaf]):
                del node[leaf]
    return found
