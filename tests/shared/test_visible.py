"""Text from outside in commands that readers copy: quoted for a shell, without control characters."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.visible import is_visible, quoted

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"(?:volley [a-z]+|uv [a-z]+|pip install|chmod \d+|curl|export \w+=)\s?")
QUOTING = {"quoted", "join"}


@pytest.mark.parametrize(
    "word", ["runs/a", "$(id)", "a;touch b", "`id`", "it's", "a b", "", "~", "-x", "a\\", "*", "!1"]
)
def test_a_shell_reads_a_quoted_word_as_it_is(word: str):
    assert shlex.split(f"volley verify {quoted(word)} --json") == ["volley", "verify", word, "--json"]


@pytest.mark.parametrize("word", ["toy;touch b\nid", "a\x1b[201~id\r", "a\u202eb", "a\u2028b"])
def test_control_characters_never_reach_a_command(word: str):
    assert not is_visible(word)
    assert is_visible(quoted("volley", word))
    assert len(shlex.split(quoted(word))) == 1


def data_in_commands(file: Path) -> Iterator[str]:
    """Expressions that an f-string puts into a command between backticks, or on a line of its own."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        parts = [part.value if isinstance(part, ast.Constant) else f"\0{i}\0" for i, part in enumerate(node.values)]
        text = "".join(map(str, parts))
        for span in [*re.findall(r"`([^`]*)`", text), *re.findall(r"(?:^|: +|\n)([^`\n]*)", text)]:
            for i in re.findall("\0(\\d+)\0", span) if PROGRAM.match(span) else ():
                value = getattr(node.values[int(i)], "value", None)
                call = value.func if isinstance(value, ast.Call) else None
                name = getattr(call, "id", getattr(call, "attr", ""))
                shown = ast.unparse(value)
                if name not in QUOTING and not shown.rpartition(".")[2].isupper():
                    yield f"{file.relative_to(ROOT)}: {shown}"


def test_commands_in_messages_quote_their_data():
    folders = [*(ROOT / name for name in ("services", "shared", "volley")), *ROOT.glob("packages/*/volley_*")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {one for file in files for one in data_in_commands(file)}
    known = {
        "volley/bootstrap.py: cause",
        "packages/serving/volley_serving/serve.py: header",
        "packages/python/volley_python/client/tables.py: package",
    }
    assert found == known, "no data in these"
