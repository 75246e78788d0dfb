"""The page for users of other trainers names settings and commands that Volley has."""

from __future__ import annotations

import re

import pytest

from shared.schema import RunConfig
from tests.docs.commands import ROOT
from tools.docs.keys import chapters
from volley.__main__ import parser
from volley.commands.configuration import schema

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
