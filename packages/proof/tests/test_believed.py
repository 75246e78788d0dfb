"""Every value that a reader of a folder believes is checked against a record, or named in docs/security.md."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support import believed, believed_folders
from tests.support.believed import BELIEVED, entry_of
from volley.layout import PROJECT

DOCS = PROJECT / "docs" / "security.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return believed_folders.make(tmp_path_factory.mktemp("valid"))


def test_every_file_and_field_is_in_the_list(folders: list[Path]):
    found = {one.what for folder in folders for one in believed.mutations(folder, random.Random(0))}
    assert sorted(one for one in found if entry_of(one) is None) == []


@pytest.mark.parametrize("entry", [one for one in BELIEVED if one.against is None], ids=lambda entry: entry.what)
def test_what_is_not_checked_is_in_the_documentation(entry: believed.Entry):
    text = " ".join(DOCS.read_text(encoding="utf-8").partition("## Not checked in a folder")[2].split())
    assert entry.sentence in text


@pytest.mark.parametrize("most", [1, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_a_change_is_named_or_said_not_to_be_checked(folders: list[Path], most: int):
    found = believed.tried(folders, 1, most)
    assert [(one.what, one.how) for one, result in found.items() if result == "believed" and not _is_excused(one)] == []
    assert sum(result == "named" for result in found.values()) > len(found) // 2


def _is_excused(one: believed.Mutation) -> bool:
    """True for what the documentation names: the newest line of some files is in no commit record yet.

    A crash leaves a metrics.jsonl without its last line, which the newest checkpoint carries.
    """
    entry = entry_of(one.what)
    if entry is None or entry.against is None:
        return entry is not None
    is_last = re.search(r"in line (\d+) of \1$", one.how) is not None
    is_crash = one.what == "metrics.jsonl:" and one.how.startswith("removed")
    return is_last and (is_crash or "but the newest lines" in entry.against)
