"""Modules that a user's file imports from its own folder, found by reading, without importing any of them."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

_METADATA = re.compile(r"^# /// script\s*$\n(?P<text>(^#(| .*)$\n)+)^# ///$", re.MULTILINE)
_MODULE = re.compile(r"'-m', '([A-Za-z_]\w*)")
"""Module that the command of an agent starts."""


def files_with_imports(file: Path, name: str) -> dict[str, Path]:
    """Return a file, called `name`, and the modules of its folder that it needs, by their names in an archive.

    They are those that it imports, and `NAME` of a list such as `["python", "-m", "NAME"]`, the command of an agent.

    Raises ConfigError, also for an import that leads out of the folder.
    """
    found, waiting = dict[str, Path](), [(name, file)]
    while waiting:
        name, path = waiting.pop()
        if name not in found:
            found[name] = path
            waiting += _imported(name, path, file.parent)
    return found


def tree_of(file: Path) -> ast.Module:
    """Parse a Python file. Raises ConfigError."""
    try:
        return ast.parse(text_of(file), str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}", "correct the file") from error


def text_of(file: Path) -> str:
    """Read a Python file in the encoding that it declares. Raises ConfigError."""
    try:
        with tokenize.open(file) as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "save it as UTF-8") from error


def metadata_of(name: str, text: str) -> dict[str, Any]:
    """Read a file's PEP 723 block, empty if there is none. Raises ConfigError."""
    if (match := _METADATA.search(text)) is None:
        return {}
    lines = match["text"].splitlines()
    try:
        return tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: its block `# /// script` is no TOML: {error}", "see PEP 723") from error


def _imported(name: str, path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield modules and packages of `folder` that a file imports. Raises ConfigError."""
    tree = tree_of(path)
    attempts = (one for one in ast.walk(tree) if isinstance(one, ast.Try) and one.handlers)
    optional = {inner for one in attempts for statement in one.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = [one.name.partition(".")[0] for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            tops = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.List) and (command := _MODULE.search(ast.unparse(node))):
            tops = [command[1]]
        else:
            if isinstance(node, ast.ImportFrom) and node.level > name.count("/") and node not in optional:
                raise ConfigError(
                    f"{path}, line {node.lineno}: the import `from {'.' * node.level}{node.module or ''}` leads out of"
                    f" {folder}",
                    "import modules of that folder without the dot, or name the folder of the whole package",
                )
            continue
        for top in tops:
            for inner in _modules(folder, top):
                if not inner.resolve().is_relative_to(folder.resolve()):
                    raise ConfigError(
                        f"{path} imports {top}: {inner} is a link that leads out of the folder",
                        "put a copy of the file in its place",
                    )
                yield inner.relative_to(folder).as_posix(), inner


def _modules(folder: Path, top: str) -> list[Path]:
    """Files of the module or package `top` in a folder."""
    if (module := folder / f"{top}.py").is_file():
        return [module]
    return sorted((folder / top).rglob("*.py")) if (folder / top / "__init__.py").is_file() else []
