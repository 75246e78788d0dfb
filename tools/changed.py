"""Tests that a change can reach, for `make test ARGS=--changed` or `ARGS=--changed=REVISION`.

A change is what differs from a revision (`origin/main` where there is one, else `HEAD`), new files included. It reaches
a test file over imports, taken from the syntax of all files. Where imports cannot tell, more is run:

- A string that is the dotted name of a module, or of something in it, uses the module, for commands are imported by
  name. In a file that starts programs (`python -m`), so does the name of a service or of the command `volley`.
- The supervisor uses all services, and an `__init__` that imports by name its whole folder.
- `shared/packages.py` uses the modules of a package's entry points if the change is in that package. Changes elsewhere
  do not go through entry points, for then each would reach every test.
- A file uses each `conftest.py` above it. A change of an `__init__.py` is one of its whole folder.
- A file that is no Python is used by the modules beside it and by those with a string of its name.
- Files that decide what is installed or how tests run are used by every test.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath

ROOTS = ("services", "shared", "volley", "tools", "tests", "packages", "bridges", "examples", "conftest.py")
_EVERYTHING = re.compile(
    r"(packages/[^/]+/)?pyproject\.toml|uv\.lock|conftest\.py|tests/__init__\.py|tools/(testing|changed)\.py|volley/bootstrap\.py"
)
_NAME = re.compile(r"(?:services|shared|tools|tests|volley|volley_\w+)(?:\.\w+)+")
_PROGRAM = re.compile(r"services\.\w+|volley")
_STARTS_SERVICES, _FINDS_PACKAGES = "volley/local/stack.py", "shared/packages.py"


class Sources:
    """Python files of the project and what each uses. Names of files are relative, with slashes."""

    def __init__(self, root: Path) -> None:
        found = [path for top in ROOTS for path in ((root / top).rglob("*.py") if "." not in top else root.glob(top))]
        self.texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(found)}
        self._entries = {name for path in root.glob("packages/*/pyproject.toml") for name in _entries(path)}

    @cached_property
    def users(self) -> dict[str, set[str]]:
        """Files that use a name of a module, by the name."""
        users: dict[str, set[str]] = {}
        for file, text in self.texts.items():
            for name in _uses(file, text):
                users.setdefault(name, set()).add(file)
        return users

    def reached(self, changed: Iterable[str]) -> set[str]:
        """Files that the changed ones reach, themselves included."""
        waiting = [file for one in changed for file in (one, *self._below(one, "__init__.py"))]
        found, folders = set[str](), {PurePosixPath(one).parts[:2] for one in waiting}
        while waiting:
            if (file := waiting.pop()) in found:
                continue
            found.add(file)
            waiting += self._users_of(file)
            if PurePosixPath(file).parts[:2] in folders and self._entries.intersection(_names(PurePosixPath(file))):
                waiting.append(_FINDS_PACKAGES)
        return found

    def _users_of(self, file: str) -> set[str]:
        path = PurePosixPath(file)
        if path.suffix != ".py":
            return self._mention(path)
        users = set[str]().union(*(self.users.get(name, ()) for name in _names(path)))
        if path.match("services/*/__main__.py"):
            users.add(_STARTS_SERVICES)
        if "import_module(" in self.texts.get(chooser := str(path.parent / "__init__.py"), ""):
            users.add(chooser)
        return users.union(self._below(file, "conftest.py"))

    def _below(self, file: str, name: str) -> Iterator[str]:
        """Files in the folder of a file, if it has this name."""
        path = PurePosixPath(file)
        yield from (other for other in self.texts if path.name == name and other.startswith(f"{path.parent}/"))

    def _mention(self, path: PurePosixPath) -> set[str]:
        """Files with a string that ends in the name of a file that is no Python, and modules beside it.

        Tests may build names from parts, or read a whole folder: names without a suffix and of folders count there.
        """
        named, parts = _ends_with([path.name]), _ends_with([path.stem, *(path.parts[1:-1] or path.parts[:-1])])
        found = {file for file, text in self.texts.items() if named.search(text)}
        found |= {file for file, text in self.texts.items() if _is_test(file) and parts.search(text)}
        return found | {file for file in self.texts if str(PurePosixPath(file).parent) == str(path.parent)}


def _ends_with(names: list[str]) -> re.Pattern[str]:
    """Pattern of a string that ends in one of the names."""
    return re.compile(rf"""["'](?:[^"'\s]*/)?(?:{"|".join(map(re.escape, names))})/?["'*]""")


def _is_test(file: str) -> bool:
    return "tests" in PurePosixPath(file).parts


def changed_files(root: Path, revision: str | None) -> list[str]:
    """Files that differ from the revision, new and removed ones included. Raises CalledProcessError."""
    known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "origin/main"], cwd=root, capture_output=True)
    base = revision or ("origin/main" if known.returncode == 0 else "HEAD")
    commands = (["diff", "--name-only", "--no-renames", base], ["ls-files", "--others", "--exclude-standard"])
    return [line for command in commands for line in _git(root, command).splitlines()]


def reached_tests(root: Path, revision: str | None) -> list[str]:
    """Test files that the change since a revision reaches."""
    changed, sources = changed_files(root, revision), Sources(root)
    everything = any(_EVERYTHING.fullmatch(file) for file in changed)
    files = sources.texts if everything else sources.reached(changed)
    return sorted(file for file in files if PurePosixPath(file).match("test_*.py") and file in sources.texts)


def _git(root: Path, arguments: list[str]) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, encoding="utf-8").stdout


def _names(path: PurePosixPath) -> Iterator[str]:
    """Names under which a file is imported: from the project's folder, and from that of its package or bridge."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    yield ".".join(parts)
    if parts[:1] in (("packages",), ("bridges",)) and "tests" not in parts:
        yield ".".join(parts[2:])


def _entries(path: Path) -> Iterator[str]:
    """Modules of a distribution's entry points."""
    groups = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    yield from (value.partition(":")[0] for points in groups.values() for value in points.values())


def _uses(file: str, text: str) -> Iterator[str]:
    """Names of the modules that a file uses, and of names in them."""
    path, starts = PurePosixPath(file), '"-m"' in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                yield from (name, *(f"{of}.{name}" for of in _names(path.parent / "__init__.py")))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_named(node.value, starts):
            yield from (node.value, f"{node.value}.__main__")
            yield from (of for of in accumulate(node.value.split("."), "{}.{}".format) if "." in of)
    if path.name == "__main__.py":
        yield from (f"{of}.app" for of in _names(path.parent / "__init__.py"))


def _is_named(text: str, starts: bool) -> bool:
    """Tell if a string names a module; `starts`: its file starts programs."""
    return starts if _PROGRAM.fullmatch(text) else bool(_NAME.fullmatch(text))
