"""docs/follow-a-token.md: ten files in order, and each name that a section mentions is defined in a file it links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

PAGE = ROOT / "docs" / "follow-a-token.md"
FILES = re.findall(r"^### (\d+)\. \[[^]]+\]\(\.\./([^)]+)\)\n(.*?)(?=^##|\Z)", PAGE.read_text("utf-8"), re.M | re.S)
MOST_LINES = 2800


def defined(path: Path) -> set[str]:
    """Names of classes and functions, and of methods also with their class."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return names


def test_ten_files_follow_each_other_and_are_read_in_an_afternoon() -> None:
    assert [int(number) for number, _, _ in FILES] == list(range(1, 11))
    n_lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for _, path, _ in FILES)
    assert n_lines < MOST_LINES


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for _, path, text in FILES], ids=[path for _, path, _ in FILES]
)
def test_the_names_of_a_section_are_in_its_files(path: str, text: str) -> None:
    linked = [ROOT / one for one in (path, *re.findall(r"\]\(\.\./([^)#]+\.py)\)", text))]
    known = set().union(*map(defined, linked))
    names = set(re.findall(r"`([A-Za-z_.]+)`", text))
    assert names
    assert names - known == set()


def test_the_pictures_number_the_files_as_the_page_does() -> None:
    picture = (ROOT / "docs" / "images" / "token-path.svg").read_text(encoding="utf-8")
    assert [
        f"{number} {Path(path).stem}" for number, path, _ in FILES if f">{number} {Path(path).stem}<" not in picture
    ] == []
