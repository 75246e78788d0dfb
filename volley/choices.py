"""Values for settings that a configuration leaves out: why each was chosen, and the package that chooses.

Without the package volley-rl-launch, a run takes the defaults of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import orjson

from shared import packages
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.models.config import ModelConfig
from shared.run.folder import RunFolder
from volley.runs.run_file import write_json

_MOST_BYTES = 2**16


class Planner(Protocol):
    """See volley_launch.planning.automatic."""

    def fit(self, loaded: LoadedConfig, model: ModelConfig) -> LoadedConfig: ...

    def shortages(self, loaded: LoadedConfig, model: ModelConfig) -> dict[str, ConfigError]: ...


def fit(loaded: LoadedConfig, model: ModelConfig) -> LoadedConfig:
    """Choose values for settings that are left out, from the model and this machine."""
    return loaded if (planner := _planner()) is None else planner.fit(loaded, model)


def shortages(loaded: LoadedConfig, model: ModelConfig) -> dict[str, ConfigError]:
    """Return an error for `training`, the `pool` of a rollout server or the `host`, whichever lacks memory."""
    return {} if (planner := _planner()) is None else planner.shortages(loaded, model)


def _planner() -> Planner | None:
    return packages.part("planner", required=False)


def lines(loaded: LoadedConfig) -> list[str]:
    """Return a line for each chosen value, with its reason."""
    values = loaded.config.model_dump(mode="json")
    return [f"{key}={_value(values, key)}: {reason}" for key, reason in loaded.choices.items()]


def record(loaded: LoadedConfig, folder: RunFolder) -> None:
    """Add the reasons of the chosen values to the run's folder. Raises StorageFull."""
    if loaded.choices:
        write_json(folder.choices, {**reasons(folder), **loaded.choices})


def reasons(folder: RunFolder) -> dict[str, str]:
    """Read the reasons of the values that were chosen for a run; none if there are none."""
    with suppress(OSError, ValueError):
        found = orjson.loads(read_file(folder.choices, _MOST_BYTES))
        return {str(key): str(reason) for key, reason in found.items()} if isinstance(found, dict) else {}
    return {}


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def is_given(loaded: LoadedConfig, key: str) -> bool:
    """Return True if the configuration has a value for the key."""
    node: Any = loaded.tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
