"""Built-in environments: the core's, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.env.environments.games.frozen_lake import FrozenLakeConfig, frozen_lake
from shared import packages


@dataclass(frozen=True, slots=True)
class EnvironmentKind[C: BaseModel]:
    """A built-in environment: its configuration model, its constructor, and the keys that a request may not set.

    `in_sandbox`: it runs programs in sandboxes, so it is also built with the `Equipment` and stays in the service's
    process. `distribution` is the installed package whose version determines its tasks. `files` lists the data files of
    a configuration beside `train` and `eval`, by the name of the part; it raises ConfigError.
    """

    config: type[C]
    build: Callable[..., Any]
    private: frozenset[str] = frozenset()
    in_sandbox: bool = False
    distribution: str | None = None
    files: Callable[[Mapping[str, Any]], Iterable[tuple[str, Path]]] | None = None


@cache
def kinds() -> dict[str, EnvironmentKind[Any]]:
    """Return the kinds by name. Raises ConfigError."""
    return {
        "frozen_lake": EnvironmentKind(FrozenLakeConfig, frozen_lake),
        **packages.loaded(packages.ENVIRONMENTS),
        **packages.loaded(packages.DATASETS),
    }
