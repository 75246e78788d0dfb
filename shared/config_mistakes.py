"""Explain mistakes in a configuration: the key, what is wrong, and what to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from shared import packages
from shared.errors import ConfigError
from shared.hints import advice, hint_for, meant_by, renamed
from shared.removed_keys import REMOVED
from shared.run_config import run_model
from shared.visible import shortened

_MAX_NAMED = 10  # mistakes in one message
_MANY = 3
"""Number of another trainer's keys from which the whole file is taken for that trainer's."""
_LISTS = ("tuple_type", "list_type", "set_type", "frozen_set_type")
_BOUNDS = ("greater_than", "greater_than_equal")


def explained(error: ValidationError) -> ConfigError:
    """Return the error that names each mistake and what to write."""
    mistakes: Sequence[Any] = error.errors()
    if found := _of_another_trainer(mistakes):
        return found
    mistakes = mistakes[:_MAX_NAMED]
    hint = next(filter(None, map(_hint, mistakes)), "")
    return ConfigError("; ".join(map(_explain, mistakes)), hint)


def check_form(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the first override is not of the form `key.path=value`; the others follow it."""
    override, *later = overrides
    key, sign, _ = override.partition("=")
    if sign and key:
        return
    value = "".join(later[:2]).lstrip("=") if later[:1] == ["="] else later[0].lstrip("=") if later else ""
    is_pair = override and value and "=" not in value
    meant = f"{override}={value}" if is_pair else "key.path=value"
    raise ConfigError(f"override {override!r} is not of the form key.path=value", f"write {meant} without spaces")


def named(name: str, section: str = "trainer") -> list[str]:
    """Return the keys of that name, those of `section` first."""
    found = [one for one in _keys(run_model()) if one.rpartition(".")[2] == name]
    return sorted(found, key=lambda one: (not one.startswith(f"{section}."), one.count(".")))


def setting_of(name: str, value: str, section: str) -> str | None:
    """Return what to write for a setting that is named like an option; None if there is no such setting.

    One in `section` is preferred to those of the same name.
    """
    if found := renamed(name, value):
        return advice(found[1], value)
    if section == "trainer" and (meant := meant_by(name, value)):
        return meant
    keys = named(name, section)
    return advice(keys[0], value) if keys else None


def _of_another_trainer(mistakes: Sequence[Any]) -> ConfigError | None:
    """Return the error for a file of another trainer; None if the mistakes are others."""
    unknown = {str(one["loc"][0]): one["input"] for one in mistakes if one["type"] == "extra_forbidden"}
    theirs = {key: found for key, value in unknown.items() if (found := renamed(key, value)) and "." not in key}
    if len(theirs) < _MANY:
        return None
    trainer = next(iter(theirs.values()))[0]
    settings = {key: text.partition("; ")[0] for key, (_, text) in theirs.items()}
    texts = [f"{key} is {setting}" for key, setting in settings.items() if " " not in setting]
    return ConfigError(
        f"{shortened(theirs, 3)} are keys of {trainer}",
        f"{', '.join(texts[:3])}; docs/migration.md#from-{trainer.lower()} lists them all",
    )


def _hint(error: Any) -> str:
    """Name the valid values or keys, shortened, or what to write for a value of another kind."""
    key = ".".join(str(part) for part in _located(error["loc"])[0])
    if error["type"] == "union_tag_invalid":
        return f"valid: {shortened(one.strip(chr(39) + ' ') for one in error['ctx']['expected_tags'].split(','))}"
    if error["type"] == "extra_forbidden":
        return _valid(error)
    if error["type"] in _LISTS and isinstance(error["input"], str | int | float):
        return f"write {key}=[{str(error['input'])[:200]}]"
    if error["type"] == "string_pattern_mismatch" and key == "run.name":
        return "a name has at most 64 letters, digits, '.', '_' and '-', and begins with a letter or digit"
    if error["type"] in _BOUNDS and _may_be_null(error["loc"]):
        return f"for none, write {key}=null"
    if key == "algorithm" and isinstance(error["input"], str):
        return ""
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key} is a section: write {key}.KEY=VALUE"
    if error["type"] == "missing" and key == "model":
        return "write model.path=MODEL: a folder or a hub id"
    if error["type"].startswith(("int_", "float_")) and not isinstance(error["input"], str | int | float):
        return f"write {key}=NUMBER"
    return ""


def _explain(error: Any) -> str:
    loc, section = _located(error["loc"])
    key = ".".join(str(part) for part in loc) or "configuration"
    tag = str(error.get("ctx", {}).get("discriminator", "")).strip("'")
    if error["type"] == "extra_forbidden":
        return _explain_unknown(key, getattr(section, "model_fields", {}), error["input"])
    if loc == ("algorithm",) and isinstance(error["input"], str):
        found = renamed("algorithm.name", error["input"])
        return f"algorithm is a section: write {found[1] if found else f'algorithm.name={error["input"][:200]}'}"
    if error["type"] == "union_tag_invalid":
        given, expected = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        if found := renamed(f"{key}.{tag}", given):
            return f"{key}.{tag}={given!r}: {advice(found[1])}"
        if key == "algorithm" and (absent := packages.missing(given)):
            return f"{key}.{tag}={given!r}: {absent}"
        near = get_close_matches(given, [one.strip("' ") for one in expected.split(",")], n=1)
        return f"{key}.{tag}={given!r}: " + (f"did you mean {near[0]}?" if near else "unknown")
    if error["type"] == "union_tag_not_found":
        return f"{key}.{tag} is missing"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]) if not loc else f"{key}: {error['ctx']['error']}"
    if error["type"] == "model_type":
        return f"{key} is a section, not {repr(error['input'])[:200]}"
    if error["input"] is None:
        return f"{key} has no value"
    if error["type"] in _LISTS:
        return f"{key}={repr(error['input'])[:200]} is not a list"
    told = error["msg"].partition(", unable to parse")[0]  # which says the same again
    return f"{key}={repr(error['input'])[:200]}: {told[0].lower()}{told[1:]}"


def _explain_unknown(key: str, known: Iterable[str], value: Any) -> str:
    """Name the key that was meant: another trainer's, a similar one of the same section, or one of another section."""
    if key in REMOVED:
        return f"unknown key {key}: {REMOVED[key].successor} replaced it"
    if found := hint_for(key, value):
        return f"unknown key {key}: {found[0]} ({found[1]})"
    if owner := packages.missing(key):
        return f"unknown key {key}: {owner}"
    section, dot, name = key.rpartition(".")
    if (theirs := renamed(name, value)) and theirs[1] != key:
        return f"unknown key {key}: {name} is a key of {theirs[0]} ({advice(theirs[1], value)})"
    if not section and (meant := meant_by(name, value)):
        return f"unknown key {key}: {meant}"
    if near := get_close_matches(name, known, n=1, cutoff=0.75):
        return f"unknown key {key}: did you mean {section}{dot}{near[0]}?"
    if elsewhere := [one for one in named(name, section or "trainer") if one != key]:
        return f"unknown key {key}: did you mean {' or '.join(elsewhere[:2])}?"
    return f"unknown key {key}"


def _valid(error: Any) -> str:
    """List the keys of a section, if nothing else is said about the unknown one."""
    loc, section = _located(error["loc"])
    known = getattr(section, "model_fields", {})
    key = ".".join(map(str, loc))
    said = _explain_unknown(key, known, error["input"])
    return f"valid here: {shortened(known, 12)}" if known and said == f"unknown key {key}" else ""


def _may_be_null(loc: tuple[Any, ...]) -> bool:
    """True for a number that may be left out with null."""
    found, section = _located(loc)
    field = getattr(section, "model_fields", {}).get(found[-1])
    return field is not None and type(None) in get_args(field.annotation)


def _keys(section: Any, prefix: str = "") -> Mapping[str, None]:
    """List the dotted keys of a section and of the sections in it, of each kind of a union, each once."""
    found = dict[str, None]()
    for name, one in section.model_fields.items():
        found[prefix + name] = None
        for inner in (one.annotation, *get_args(one.annotation)):
            if hasattr(inner, "model_fields"):
                found |= _keys(inner, f"{prefix}{name}.")
    return found


def _located(loc: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Location without the tags of unions, which pydantic adds, and the section of its last key (None if unknown)."""
    found, section, of = list[Any](), None, run_model()
    for part in loc:
        if tagged := [one for one in get_args(of) if _is_tagged(one, part)]:
            of = tagged[0]
            continue
        found.append(part)
        section = of if hasattr(of, "model_fields") else None
        of = getattr(getattr(section, "model_fields", {}).get(part), "annotation", None)
    return tuple(found), section


def _is_tagged(section: Any, tag: Any) -> bool:
    """True if `tag` selects this section of a union."""
    fields = getattr(section, "model_fields", {})
    return any(name in fields and tag in get_args(fields[name].annotation) for name in ("name", "kind"))
