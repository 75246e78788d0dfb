"""Reference of the configuration keys, made from the JSON schema of configuration files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

type Schema = Mapping[str, Any]
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Chapter:
    """Keys of one section of the configuration.

    `rows` are (key, type, default, forms): the forms of a section such as `algorithm` that have the key, or all.
    """

    path: str
    description: str
    rows: list[tuple[str, str, str, str]]


def chapters(whole: Schema) -> Iterator[Chapter]:
    """Yield a chapter for the configuration and for each section in it, outermost first."""
    yield from _chapters(whole["$defs"], "", [whole])


def _chapters(known: Schema, path: str, forms: Sequence[Schema]) -> Iterator[Chapter]:
    rows: dict[tuple[str, str, str], list[str]] = {}
    inner: dict[str, dict[str, Schema]] = {}
    names = [_form(form) for form in forms]
    order = list(dict.fromkeys(key for form in forms for key in form["properties"]))
    for form in forms:
        for key, value in form["properties"].items():
            sections = {name: known[name] for name in _references(value) if "properties" in known[name]}
            default = "" if sections or "default" not in value else _text(value["default"])
            row = (
                (key, " | ".join(names), "") if names[1:] and "const" in value else (key, _kind(known, value), default)
            )
            rows.setdefault(row, []).append(_form(form))
            inner.setdefault(f"{path}.{key}{_item(value)}".lstrip("."), {}).update(sections)
    described = [(*row, _those(of, names)) for row, of in sorted(rows.items(), key=lambda row: order.index(row[0][0]))]
    yield Chapter(path, forms[0].get("description", "") if len(forms) == 1 else "", described)
    for below, sections in inner.items():
        if sections:
            yield from _chapters(known, below, [*sections.values()])


def _references(value: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a value, an item of a list or a value of a mapping may have."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2]
    for part in (
        *value.get("anyOf", ()),
        *value.get("oneOf", ()),
        value.get("items"),
        value.get("additionalProperties"),
    ):
        if isinstance(part, Mapping):
            yield from _references(part)


def _item(value: Schema) -> str:
    parts = (value, *value.get("anyOf", ()))
    return ".NAME" if any(isinstance(part.get("additionalProperties"), Mapping) for part in parts) else ""


def _those(of: Sequence[str], names: Sequence[str]) -> str:
    """Name the forms `of` out of `names`, or those that are missing, if they are fewer."""
    others = [name for name in names if name not in of]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(of) else ", ".join(of)


def _text(value: Any) -> str:
    """Write a value as YAML would, in one line."""
    text = value.replace("\n", " ") if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _form(section: Schema) -> str:
    """Return the value that tells a form of a section from others: of `name` or `type`."""
    values = [section["properties"].get(key, {}).get("const") for key in ("name", "type")]
    return next((value for value in values if value), section.get("title", ""))


def _kind(known: Schema, value: Schema) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return "section" if "properties" in known[name] else _kind(known, known[name])
    if "const" in value:
        return _text(value["const"])
    if "enum" in value:
        return " | ".join(map(_text, value["enum"]))
    if choices := value.get("anyOf") or value.get("oneOf"):
        return " | ".join(dict.fromkeys(_kind(known, choice) for choice in choices))
    kind = value.get("type", "any")
    if kind == "array":
        items = [_kind(known, item) for item in value.get("prefixItems", [value.get("items", {})])]
        return f"list of {', '.join(items)}"
    if kind == "object" and isinstance(value.get("additionalProperties"), Mapping):
        return f"mapping to {_kind(known, value['additionalProperties'])}"
    bounds = [f"{sign} {value[bound]}" for bound, sign in _BOUNDS.items() if bound in value]
    return " ".join([kind, ", ".join(bounds)]).strip()
