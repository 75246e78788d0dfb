"""The environments this service offers: the built-in ones, and configured variants of them.

Invariants: a name never changes its meaning while the process lives, and at most MAX_VARIANTS can be added, so that the
catalogue is bounded. Files of a dataset are set by whoever runs the service, never through a request.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from services.env.environments.adapters.gymnasium import Gymnasium, GymnasiumConfig
from services.env.environments.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig
from services.env.environments.base import Environment
from services.env.environments.games.frozen_lake import FrozenLakeConfig, frozen_lake
from services.env.environments.games.sokoban import SokobanConfig, sokoban
from services.env.environments.gsm8k.environment import Gsm8k, Gsm8kConfig
from shared.errors import Conflict, Forbidden, InputError, NotFound, Unavailable

MAX_VARIANTS = 64

type Build = Callable[[CatalogueEntry, Callable[[], Environment]], Awaitable[Environment]]

_MAX_ERRORS = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class EnvironmentKind[C: BaseModel]:
    """A built-in environment: its configuration model, how it is built, and the keys a request may not set."""

    config: type[C]
    build: Callable[[C], Environment]
    private: frozenset[str] = frozenset()


KINDS: Mapping[str, EnvironmentKind[Any]] = {
    "gsm8k": EnvironmentKind(Gsm8kConfig, Gsm8k, frozenset({"train", "eval"})),
    "frozen_lake": EnvironmentKind(FrozenLakeConfig, frozen_lake),
    "sokoban": EnvironmentKind(SokobanConfig, sokoban),
    "gymnasium": EnvironmentKind(GymnasiumConfig, Gymnasium),
    "reasoning_gym": EnvironmentKind(ReasoningGymConfig, ReasoningGym),
}
"""An environment is added here."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One environment on offer. `kind` is the built-in it comes from."""

    name: str
    kind: str
    config: BaseModel
    environment: Environment

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.kind, "config": self.config.model_dump(mode="json")}


class Catalogue:
    """Args: configs: settings of built-in environments that differ from their defaults, by name. Raises NotFound,
    InputError.
    """

    def __init__(self, configs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        given = dict(configs or {})
        self._entries: dict[str, CatalogueEntry] = {}
        for name in KINDS:
            self._entries[name] = _entry(name, name, given.pop(name, {}))
        for unknown in given:
            self.get(unknown)

    def get(self, name: str) -> CatalogueEntry:
        """Raises NotFound listing the environments there are."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"there is no environment {name!r}", f"available: {', '.join(self._entries)}")
        return entry

    def entries(self) -> tuple[CatalogueEntry, ...]:
        return tuple(self._entries.values())

    async def register(
        self, name: str, base: str, config: Mapping[str, Any], build: Build
    ) -> tuple[CatalogueEntry, bool]:
        """Adds `base` with some settings changed under a new name; the same request again changes nothing.

        `build` runs what makes the environment and tries it out, as it runs other calls into `base`.

        Returns the entry and whether it is new. Raises NotFound (base), InputError (name, settings, too few tasks),
        Forbidden (private settings), Conflict (the name has another meaning), Unavailable (full).
        """
        if not _NAME.fullmatch(name):
            raise InputError(f"{name[:80]!r} is not a name", "use up to 64 letters, digits, '.', '_' and '-'")
        parent = self.get(base)
        for key in sorted(KINDS[parent.kind].private & config.keys()):
            raise Forbidden(
                f"{parent.kind}: {key} cannot be set by a request", "it belongs in the configuration of the service"
            )
        valid = _valid(parent.kind, {**parent.config.model_dump(), **config})
        if (known := self._known(name, parent.kind, valid)) is not None:
            return known, False
        environment = await build(parent, lambda: _tried(KINDS[parent.kind].build(valid)))
        if (known := self._known(name, parent.kind, valid)) is not None:
            return known, False
        self._entries[name] = entry = CatalogueEntry(name, parent.kind, valid, environment)
        return entry, True

    def _known(self, name: str, kind: str, config: BaseModel) -> CatalogueEntry | None:
        """The entry that is there already, None where there is room for it. Raises Conflict, Unavailable."""
        known = self._entries.get(name)
        if known is not None and (known.kind, known.config) != (kind, config):
            raise Conflict(f"the environment {name!r} exists with other settings", "choose another name")
        if known is None and len(self._entries) >= len(KINDS) + MAX_VARIANTS:
            raise Unavailable(
                f"{MAX_VARIANTS} environments have been registered", "restart the service to forget them", 60.0
            )
        return known


def try_out(environment: Environment) -> None:
    """Makes the first task of every split. Raises InputError naming the settings that allow none, or make them too
    rare.
    """
    for split in environment.splits:
        environment.task(split, 0)


def _tried(environment: Environment) -> Environment:
    try_out(environment)
    return environment


def _valid(kind: str, config: Mapping[str, Any]) -> BaseModel:
    try:
        return KINDS[kind].config.model_validate(dict(config))
    except ValidationError as error:
        raise InputError(f"{kind}: {'; '.join(_explain(kind, e) for e in error.errors()[:_MAX_ERRORS])}") from error


def _entry(name: str, kind: str, config: Mapping[str, Any]) -> CatalogueEntry:
    valid = _valid(kind, config)
    return CatalogueEntry(name, kind, valid, KINDS[kind].build(valid))


def _explain(kind: str, error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown setting {key} (it has: {', '.join(KINDS[kind].config.model_fields)})"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}={reprlib.repr(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"
