"""Text is UTF-8 in every locale: every call that reads or writes text names its encoding.

ruff's PLW1514 finds the calls whose types it can infer; this test finds the others by their names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("services", "shared", "volley", "packages", "tools", "tests", "docker", "configs")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
OPENERS = {"fdopen", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
RUNNERS = {"run", "Popen", "check_output", "create_subprocess_exec"}
LOGS = {"TextIOWrapper", "FileHandler", "RotatingFileHandler"}


def calls_without_encoding(tree: ast.AST) -> Iterator[str]:
    """The calls in a source that use the encoding of the locale."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(k.arg == "encoding" for k in node.keywords) and is_text(node):
            yield f"{node.lineno}: {ast.unparse(node)[:100]}"


def is_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {k.arg: k.value for k in call.keywords}
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name in RUNNERS:
        return any(getattr(given.get(flag), "value", False) for flag in ("text", "universal_newlines"))
    if name in LOGS:
        return len(call.args) < 2
    if name in OPENERS or (name == "open" and isinstance(call.func, ast.Name)):
        place = 1 if name in ("open", "fdopen") else 0
        mode = given.get("mode", call.args[place] if len(call.args) > place else None)
        return is_text_mode(mode) if mode is not None else place == 1
    if name == "open" and isinstance(call.func, ast.Attribute):
        mode = given.get("mode", call.args[0] if call.args else None)
        return mode is not None and is_text_mode(mode)
    return False


def is_text_mode(mode: ast.expr) -> bool:
    """Other methods named `open` have no mode as an argument."""
    text = getattr(mode, "value", None)
    return isinstance(text, str) and 0 < len(text) <= 3 and set(text) <= set("rwax+t")


def test_every_text_file_is_opened_with_an_encoding():
    assert len(SOURCES) > 500
    found = [
        f"{path.relative_to(ROOT)}:{call}"
        for path in SOURCES
        for call in calls_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text()",
        "path.read_text(errors='replace')",
        "(folder / name).write_text(text)",
        "open(path)",
        "open(path, 'a+')",
        "path.open('w')",
        "os.fdopen(descriptor, 'w')",
        "tempfile.TemporaryFile('w+')",
        "subprocess.run(command, text=True)",
        "logging.FileHandler(path)",
    ],
)
def test_the_search_finds(source: str):
    assert list(calls_without_encoding(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'rb')",
        "path.read_text('utf-8')",
        "store.open(task)",
        "subprocess.run(c)",
        "tempfile.TemporaryFile()",
    ],
)
def test_the_search_leaves_alone(source: str):
    assert not list(calls_without_encoding(ast.parse(source)))
