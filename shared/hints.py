"""Hints for names that other trainers give to settings and arguments; a package knows these names."""

from __future__ import annotations

import re
from typing import Protocol

from shared import packages


class ForeignNames(Protocol):
    """See volley_commands.foreign_names."""

    def renamed(self, name: str, value: object = "") -> tuple[str, str] | None: ...

    def meant_by(self, name: str, value: object) -> str | None: ...

    def hint_for(self, key: str, value: object = "") -> tuple[str, str] | None: ...


def foreign_names() -> ForeignNames | None:
    """Return the names of other trainers; None without the package that knows them."""
    return packages.part("foreign_names", required=False)


def renamed(name: str, value: object = "") -> tuple[str, str] | None:
    """Return whose name this is and what to write instead; None for any other name."""
    return None if (names := foreign_names()) is None else names.renamed(name, value)


def meant_by(name: str, value: object) -> str | None:
    """Return what to write for a short name of a setting; None for any other name."""
    return None if (names := foreign_names()) is None else names.meant_by(name, value)


def hint_for(key: str, value: object = "") -> tuple[str, str] | None:
    """Return whose key this is, and what to write instead; None for any other key."""
    return None if (names := foreign_names()) is None else names.hint_for(key, value)


def advice(text: str, value: object = "") -> str:
    """Say what to write instead, from the text of a table; `value` is what was given."""
    setting, _, remark = text.partition("; ")
    if " " in setting:
        return text
    is_plain = (not remark or remark.startswith("for ")) and re.fullmatch(r"[\w./+-]{1,60}", str(value))
    if setting[:2] == "--":
        return f"give {setting}" + (f" {value}" if is_plain else "")
    if "=" not in setting:
        setting += f"={value}" if is_plain else "=…"
    return f"write {setting}" + (f"; {remark}" if remark else "")
