"""Catalogue of environments by name: built-in ones, configured variants of them, and submitted ones.

Invariants: a name never changes its meaning (for submitted environments `adder@2` is such a name; `adder` stands for
the version in use). At most MAX_VARIANTS variants can be added, so the catalogue is bounded. Variants are written to a
file before the request is answered, so they outlive the process. Only the service's configuration sets the files of a
dataset; a request cannot.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.env.backend import EnvironmentBackend
from services.env.environments.kinds import kinds
from services.env.episode_types import AsyncEnvironment, Environment, Tasks
from services.env.equipment import Equipment, EquippedBackend, GivenTools
from services.env.processes import EnvironmentProcesses, ProcessBackend
from services.env.threads import InThreads, ThreadRunner
from shared.errors import ConfigError, Conflict, Forbidden, InputError, NotFound, Unavailable
from shared.files import storage
from shared.process import telemetry

MAX_VARIANTS = 64

_MAX_ERRORS = 10
_INSTALL = "install the package volley-rl-sandbox"
_log = telemetry.Log("catalogue")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One environment on offer.

    `kind` is the built-in that it comes from, or the form of its submission; `weight` is its share in a live run,
    relative to 1 for the run's own environment, and 0 if it does not join.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    backend: EnvironmentBackend
    weight: float = 0.0

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "base": self.kind,
            "config": self.config,
            "state": "active",
            "version": None,
            "weight": self.weight,
        }


class VariantRecord(BaseModel):
    """A registered variant: `base` with some settings changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: str
    config: dict[str, Any]
    weight: float = 0.0


_VARIANTS = TypeAdapter(dict[str, VariantRecord])


class Catalogue:
    """Environments on offer.

    Args:
        configs: settings of built-in environments that differ from their defaults, by name.
        variants: file that stores registered variants.
        configured: variants from the configuration, (base, settings) by name.
        equipment: resources of tools and sandboxes.
        processes: processes for episodes; None runs them in threads of the service.

    Raises NotFound, InputError, ConfigError (the file cannot be read).
    """

    def __init__(
        self,
        runner: ThreadRunner,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        variants: Path | None = None,
        configured: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
        equipment: Equipment | None = None,
        processes: EnvironmentProcesses | None = None,
    ) -> None:
        self._runner, self._file, self._equipment, self._processes = runner, variants, equipment, processes
        given = dict(configs or {})
        self._entries: dict[str, CatalogueEntry] = {}
        self._variants: dict[str, VariantRecord] = {}
        for name in kinds():
            self._entries[name] = self._built_in(name, name, given.pop(name, {}))
        for unknown in given:
            self.get(unknown)
        for name, record in _read(variants).items():
            self._variants[name] = record
            try:
                self._entries[name] = self._variant(name, record)
            except InputError as error:
                _log.warning("registered variant skipped", env=name, reason=str(error))
        for name, (base, config) in (configured or {}).items():
            check_name(name)
            self._entries[name] = self._variant(name, VariantRecord(base=base, config=dict(config)))

    def get(self, name: str) -> CatalogueEntry:
        """The entry of that name. Raises NotFound, which lists the available environments."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"there is no environment {name[:80]!r}", f"available: {', '.join(self._entries)}")
        return entry

    def has(self, name: str) -> bool:
        return name in self._entries

    def entries(self) -> tuple[CatalogueEntry, ...]:
        return tuple(self._entries.values())

    def offer(self, entry: CatalogueEntry, *names: str) -> None:
        """Offer an environment under each of `names`, replacing earlier entries."""
        for name in names:
            self._entries[name] = entry

    def withdraw(self, name: str) -> None:
        self._entries.pop(name, None)

    def built_in(self, name: str) -> InThreads | None:
        """A built-in environment or variant in the service's own process; None for a submitted one. Raises NotFound."""
        return _local(self.get(name).backend)

    async def register(
        self, name: str, base: str, config: Mapping[str, Any], weight: float = 0.0
    ) -> tuple[CatalogueEntry, bool]:
        """Add `base` with some settings changed under a new name. Idempotent.

        The variant is built and its first tasks are made in threads of `base`. Returns the entry and whether it is new.

        Raises NotFound (base), InputError (name, settings, too few tasks), Forbidden (private settings), Conflict (the
        name exists with other settings), Unavailable (full), StorageUnavailable.
        """
        check_name(name)
        parent, running = self.get(base), self.built_in(base)
        if running is None:
            raise InputError(
                f"{base} is a submitted environment", "name a built-in environment or a variant of one as base"
            )
        for key in sorted(kinds()[parent.kind].private & config.keys()):
            raise Forbidden(
                f"{parent.kind}: {key} cannot be set by a request", "set it in the configuration of the service"
            )
        _, tools = self._split(parent.kind, config)
        if tools is not None:
            tools.check_requested()
        entry = self._built_in(name, parent.kind, {**parent.config, **config}, weight)
        if (known := self._existing(entry)) is not None:
            return known, False
        await running.call("list", lambda: try_out(_environment(entry)))
        if isinstance(entry.backend, EquippedBackend):
            await entry.backend.check_tools()
        if (known := self._existing(entry)) is not None:
            return known, False
        self._keep(name, VariantRecord(base=base, config=dict(config), weight=weight))
        self._entries[name] = entry
        return entry, True

    def _variant(self, name: str, record: VariantRecord) -> CatalogueEntry:
        """Raises NotFound, InputError."""
        parent = self.get(record.base)
        return self._built_in(name, parent.kind, {**parent.config, **record.config}, record.weight)

    def _built_in(self, name: str, kind: str, settings: Mapping[str, Any], weight: float = 0.0) -> CatalogueEntry:
        """Raises InputError."""
        own, tools = self._split(kind, settings)
        config = _valid(kind, own)
        shown = config.model_dump(mode="json")
        local = InThreads(name, kind, lambda: self._made(kind, config), self._runner)
        backend: EnvironmentBackend = local
        if self._processes is not None and not kinds()[kind].in_sandbox:
            backend = self._processes.backend(local, kind, dict(shown))
        if tools is not None:
            backend = tools.around(name, backend)
            shown |= tools.describe()
        return CatalogueEntry(name, kind, shown, backend, weight)

    def _made(self, kind: str, config: BaseModel) -> Environment | AsyncEnvironment:
        """Raises InputError."""
        if not kinds()[kind].in_sandbox:
            return kinds()[kind].build(config)
        if self._equipment is None:
            raise InputError(f"{kind}: sandboxes are not available in this service", _INSTALL)
        return kinds()[kind].build(config, self._equipment)

    def _split(self, kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], GivenTools | None]:
        """Raises InputError."""
        if self._equipment is not None:
            return self._equipment.split(kind, config)
        if "tools" in config:
            raise InputError(f"{kind}: tools are not available in this service", _INSTALL)
        return dict(config), None

    def _existing(self, wanted: CatalogueEntry) -> CatalogueEntry | None:
        """Return the existing entry; None if a new one can be added. Raises Conflict, Unavailable."""
        known = self._entries.get(wanted.name)
        if known is not None and (known.kind, known.config, known.weight) != (
            wanted.kind,
            wanted.config,
            wanted.weight,
        ):
            raise Conflict(f"the environment {wanted.name!r} exists with other settings", "choose another name")
        if known is None and len(self._variants) >= MAX_VARIANTS:
            raise Unavailable(
                f"{MAX_VARIANTS} variants have been registered",
                f"remove {self._file} and restart the service to forget them" if self._file else "",
                60.0,
            )
        return known

    def _keep(self, name: str, record: VariantRecord) -> None:
        kept = {**self._variants, name: record}
        if self._file is not None:
            with storage.storage(self._file.parent.parent):
                self._file.parent.mkdir(parents=True, exist_ok=True)
            storage.replace(self._file, _VARIANTS.dump_json(kept, indent=1))
        self._variants = kept


def check_name(name: str) -> None:
    """Raises InputError."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name[:80]!r} is not a name", "use up to 64 letters, digits, '.', '_' and '-'")


def try_out(environment: Tasks) -> None:
    """Make the first task of every split. Raises InputError naming the settings that leave no tasks or too few."""
    for split in environment.splits:
        environment.task(split, 0)


def _environment(entry: CatalogueEntry) -> Tasks:
    local = _local(entry.backend)
    assert local is not None
    return local.environment


def _local(backend: EnvironmentBackend) -> InThreads | None:
    match backend:
        case InThreads():
            return backend
        case EquippedBackend():
            return _local(backend.base)
        case ProcessBackend():
            return backend.local
        case _:
            return None


def _read(file: Path | None) -> Mapping[str, VariantRecord]:
    """Raises ConfigError."""
    if file is None or not file.exists():
        return {}
    try:
        return _VARIANTS.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "restore the file, or remove it") from error


def _valid(kind: str, config: Mapping[str, Any]) -> BaseModel:
    try:
        return kinds()[kind].config.model_validate(dict(config))
    except ValidationError as error:
        raise InputError(f"{kind}: {'; '.join(_explain(kind, e) for e in error.errors()[:_MAX_ERRORS])}") from error


def _explain(kind: str, error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown setting {key} (it has: {', '.join(kinds()[kind].config.model_fields)})"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}={reprlib.repr(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"
