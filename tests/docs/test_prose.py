"""Docstrings are plain English: none opens with a word that makes a reader look for the subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from volley.layout import PROJECT

BANNED = re.compile(r"(What|Whatever|Where|Wherever|Who|Whoever|Whom|Whose|Whether|Which|Of)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the strings that stand as statements: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for statement in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value.strip()


@pytest.mark.parametrize("folder", ["packages/*/volley_*", "services", "shared", "tools", "volley"])
def test_no_docstring_opens_with_a_relative_word(folder: str) -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PROJECT.glob(f"{folder}/**/*.py"))
        for line, text in docstrings(path)
        if BANNED.match(text)
    ]
    assert not found, "open with a noun or an imperative:\n" + "\n".join(found)
