"""What runs inside a sandbox needs nothing but a Python from 3.10 on."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from services.env import episode_types
from shared import types
from volley_sandbox.sandbox import answers, process
from volley_sandbox.sandbox.process import seccomp

INSIDE = Path(process.__file__).parents[1] / "inside"
FILES = sorted(INSIDE.glob("*.py"))


def test_there_are_files():
    assert {path.stem for path in FILES} >= {"zygote", "confine", "host"}
    assert not (INSIDE / "__init__.py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_the_standard_library_is_imported(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    allowed = sys.stdlib_module_names | {file.stem for file in FILES}
    for node in ast.walk(tree):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in names} - allowed


def constant(file: str, name: str) -> object:
    """The value of a constant of a module inside."""
    for node in ast.parse((INSIDE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(
                ast.unparse(node.value).replace("1 << 20", str(2**20)).replace("2 ** 31", str(2**31))
            )
    raise AssertionError(f"{file} has no {name}")


def test_both_sides_have_the_same_bounds():
    assert constant("values.py", "MAX_REWARD") == episode_types.MAX_REWARD
    assert constant("values.py", "MAX_MESSAGE") == types.MAX_MESSAGE
    for name, outside in (
        ("MAX_MESSAGES", answers.MAX_MESSAGES),
        ("MAX_SPLITS", answers.MAX_SPLITS),
        ("MAX_TASKS", answers.MAX_TASKS),
        ("MAX_ID", answers.MAX_TEXT),
    ):
        assert constant("values.py", name) == outside


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_the_filter():
    programs = {
        (signals, metadata): seccomp.build_program(signals=signals, metadata=metadata)
        for signals in (True, False)
        for metadata in (True, False)
    }
    assert len(set(programs.values())) == 4
    for program in programs.values():
        assert len(program) % 8 == 0
        assert 100 < len(program) // 8 < 4096
