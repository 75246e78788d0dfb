"""The configuration of a run with the sections and keys of the installed packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from shared import packages
from shared.algorithm_schema import GrpoSection, any_section
from shared.errors import ConfigError
from shared.schema import RunConfig
from shared.section import PackageKey, PackageSection, Section


@cache
def run_model() -> type[RunConfig]:
    """Return `RunConfig` with the sections, keys and algorithms of installed packages. Raises ConfigError."""
    whole = extended(RunConfig, {**sections(), **keys()})
    return create_model("RunConfig", __base__=whole, __doc__=whole.__doc__, algorithm=(any_section(), GrpoSection()))


@cache
def sections() -> Mapping[str, type[PackageSection]]:
    """Return the sections that installed packages add, by their place. Raises ConfigError."""
    return packages.loaded(packages.SECTIONS)


@cache
def keys() -> Mapping[str, PackageKey[Any]]:
    """Return the keys that installed packages add to sections of the core, by their place. Raises ConfigError."""
    return packages.loaded(packages.KEYS)


def extended[S: Section](model: type[S], added: Mapping[str, type[Section] | PackageKey[Any]]) -> type[S]:
    """Return a subclass of `model` with further sections and keys. Args: added: by dotted place.

    Raises ConfigError for a place that is taken, or below something that is no section.
    """
    fields: dict[str, Any] = {}
    about = [(model.__doc__ or "").rstrip()]
    below: dict[str, dict[str, type[Section] | PackageKey[Any]]] = {}
    for place, one in added.items():
        name, dot, rest = place.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = one
        elif name in model.model_fields:
            raise ConfigError(f"a package adds {name}, which {model.__name__} has already")
        elif isinstance(one, PackageKey):
            fields[name] = (one.type, one.default)
            about.append(one.description)
        else:
            fields[name] = (one, Field(default_factory=one))
    for name, inner in below.items():
        known = model.model_fields.get(name)
        annotation = None if known is None else known.annotation
        if known is None or not (isinstance(annotation, type) and issubclass(annotation, Section)):
            raise ConfigError(f"a package adds something to {name}, which is no section of {model.__name__}")
        whole = extended(annotation, inner)
        default = known.get_default(call_default_factory=True)
        given = default.model_dump(exclude_unset=True) if isinstance(default, Section) else {}
        fields[name] = (whole, Field(default_factory=lambda whole=whole, given=given: whole(**given)))
    return create_model(model.__name__, __base__=model, __doc__=" ".join(about), **fields) if fields else model


def sections_of(config: RunConfig) -> dict[str, PackageSection]:
    """Return the sections of packages in a configuration, by their place."""
    return {place: _at(config, place) for place in sections()}


def paths_of(config: RunConfig) -> dict[str, Sequence[Path]]:
    """Return the files that sections of packages name in a configuration, by key."""
    found = sections_of(config)
    return {f"{place}.{key}": getattr(section, key) for place, section in found.items() for key in section.paths}


def section_of[S: Section](config: RunConfig, kind: type[S]) -> S:
    """Return the section of a package in a configuration. Raises LookupError if `config` has none of that type."""
    return _value(config, sections(), kind)


def value_of[T](config: RunConfig, key: PackageKey[T]) -> T:
    """Return the value of a package's key in a configuration. Raises LookupError if `config` has no such key."""
    return _value(config, keys(), key)


def _value(config: Any, places: Mapping[str, Any], wanted: Any) -> Any:
    place = next((place for place, one in places.items() if one is wanted), None)
    if place is None:
        raise LookupError(f"no installed package adds {wanted} to the configuration")
    return _at(config, place)


def _at(config: Any, place: str) -> Any:
    return reduce(getattr, place.split("."), config)
