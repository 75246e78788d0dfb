"""The page for users of other trainers names settings and commands that Volley has."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from shared.schema import RunConfig
from tests.docs.commands import ROOT
from tools.docs.keys import chapters
from volley.__main__ import parser
from volley_commands.configuration import schema
from volley_commands.foreign_names import TRL, TUNIX, VERL

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.partition("## From TRL")[2].splitlines() if line.startswith("| `")]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})
SETTINGS = [
    name for name in NAMED if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(: .+)?", name) and not name.startswith("configs")
]


@pytest.fixture(scope="module")
def kinds() -> dict[str, set[str]]:
    """Types of each key: several, if forms of its section have different ones."""
    found: dict[str, set[str]] = {}
    for chapter in chapters(schema()):
        for key, kind, _, _ in chapter.rows:
            found.setdefault(f"{chapter.path}.{key}", set()).add(kind)
    return found


def test_settings_exist_and_may_have_the_values_that_are_named(kinds: dict[str, set[str]]) -> None:
    for name in SETTINGS:
        key, _, value = name.partition(": ")
        assert key in kinds, name
        assert not value or any(value.strip("[]") in re.findall(r"[\w+-]+", kind) for kind in kinds[key]), name
    assert len(SETTINGS) > 60


def test_every_other_name_is_a_section_a_command_a_file_or_the_last_part_of_a_key(kinds: dict[str, set[str]]) -> None:
    for name in set(NAMED) - set(SETTINGS):
        if name.startswith("volley "):
            parser().parse_args(name.split()[1:])
        elif "/" in name:
            assert (ROOT / name).is_file(), name
        else:
            last = {key.rpartition(".")[2] for key in kinds}
            values = {value for row in kinds.values() for kind in row for value in re.findall(r"[\w+-]+", kind)}
            assert name in RunConfig.model_fields or name in last | values, name


@pytest.mark.parametrize(("trainer", "table"), [("TRL", TRL), ("Tunix", TUNIX), ("verl", VERL)])
def test_the_hints_of_messages_agree_with_the_page(
    trainer: str, table: Mapping[str, str], kinds: dict[str, set[str]]
) -> None:
    rows = [row for row in _rows(trainer) if row[-1] != "Volley |"]
    assert len(rows) > 10
    for row in rows:
        for name in _names(trainer, row[0]):
            if text := table.get(name):
                setting, _, value = text.partition("; ")[0].partition("=")
                assert _explains(row[-1], setting, value), f"{name}: {text}"
            else:
                last = name.rpartition(".")[2]
                assert any(key.rpartition(".")[2] == last and _explains(row[-1], key, "") for key in kinds), name


def _rows(trainer: str) -> list[list[str]]:
    part = PAGE.partition(f"## From {trainer}\n")[2].partition("\n## ")[0]
    return [line.split(" | ") for line in part.splitlines() if line.startswith("| `")]


def _names(trainer: str, cell: str) -> list[str]:
    """Names of the first column, as the table has them: with their sections (verl), without (TRL, Tunix)."""
    found: list[str] = []
    key = ""
    for name in re.findall(r"`([^`]+)`", cell):
        if found and ": " in found[0] and ": " not in name:
            found.append(f"{key}: {name}")  # another value of the same key
            continue
        plain = name.rpartition(".")[2] if trainer == "Tunix" else name
        section = found[0].rpartition(".")[0] if trainer == "verl" and found and "." not in name else ""
        found.append(f"{section}.{plain}" if section else plain)
        key = plain.partition(": ")[0]
    return found


def _explains(cell: str, setting: str, value: str) -> bool:
    """True if the last column names the setting, or says that there is none."""
    if " " in setting:
        return "none" in cell or "`volley up" in cell or "a setting for each" in cell
    section, _, last = setting.rpartition(".")
    names = re.findall(r"`([^`]+)`", cell)
    is_named = any(one.partition(": ")[0] in (setting, last) for one in names) or setting in cell
    return is_named or (section in names and "the same" in cell) or (bool(value) and value.partition(":")[0] in cell)
