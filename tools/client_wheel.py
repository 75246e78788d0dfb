"""Build the wheel `volley-rl-client`: the Python client alone, without services, command and engines.

    python -m tools.client_wheel OUT

The client shares its code with the command. The wheel therefore holds copies of the modules that `volley_python.client`
imports, and of those that read trajectories, below one package `volley_client`. Their imports are renamed, so that it
adds no top-level `shared` or `volley` to an environment. Its dependencies are those of this project that the copies
import, with the same bounds; libraries that only a few methods need are those of the extra `full`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import grimp

from volley.layout import PROJECT
from volley_python import client

PACKAGE = "volley_client"
_ENTRY = "volley_python.client"
_PART = "volley_dashboard.trajectories.archived"
_GROUP = re.compile(r'"volley\.([a-z_]+)"')
"""Groups of entry points, renamed too: the wheel may be installed beside Volley's."""


def _entry_points() -> Mapping[str, Mapping[str, str]]:
    """Entry points that the client needs, by group: trajectories, and what every package adds to a configuration."""
    found: dict[str, dict[str, str]] = {"sections": {}, "keys": {}, "algorithms": {}, "parts": {}}
    for file in sorted(PROJECT.glob("packages/*/pyproject.toml")):
        groups = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        for group, points in found.items():
            points |= groups.get(f"volley.{group}", {})
    added = (found[group] for group in ("sections", "keys", "algorithms"))
    modules = {_PART, *(_module(point) for points in added for point in points.values())}
    return {**found, "parts": {name: point for name, point in found["parts"].items() if _module(point) in modules}}


def _module(point: str) -> str:
    return point.partition(":")[0]


_POINTS = _entry_points()
_ADDED = frozenset(_module(point) for points in _POINTS.values() for point in points.values())
_ROOTS = tuple(sorted({"shared", "volley", "volley_python", *(module.partition(".")[0] for module in _ADDED)}))
_IMPORT = re.compile(rf"^(\s*)(from|import) ({'|'.join(_ROOTS)})\b", re.MULTILINE)
_ON_DEMAND = {"huggingface_hub", "httpx", "pandas", "polars", "pyarrow", "pydantic_core", "starlette"}
"""Imported by methods that say what to install, in tests and services only, or part of another dependency."""
_FULL = {"jinja2", "omegaconf", "tokenizers", "yaml"}
"""Libraries of tokenizers and configurations: for texts of tokens, and folders that lack a supervisor's files."""
_REPLACED = {
    **dict.fromkeys(("volley", "volley_python"), ""),
    "volley.layout": f'''"""Folders of the client."""

import os
from pathlib import Path

PROJECT = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "{PACKAGE}"
''',
}
"""Texts of modules that here do what only the command needs: start runs, make environments of Python."""
_README = """# Client of Volley

Submit environments to a run of [Volley](https://pypi.org/project/volley-rl/), play its episodes as an agent, follow
it, and read its trajectories.

```python
from volley_client import Client

client = Client(env="https://env.example", orchestrator="https://orchestrator.example", token="…")
```

Trajectories show tokens by their ids; `volley-rl-client[full]` adds their
texts, and reads configurations.
"""


def main() -> int:
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        command = [
            str(Path(sys.executable).with_name("uv")),
            "build",
            "--quiet",
            "--wheel",
            "--no-build-isolation",
            "--python",
            sys.executable,
        ]
        return subprocess.run([*command, "--out-dir", str(out), folder], check=False).returncode


def stage(folder: Path) -> None:
    """Write the sources of the distribution into an empty folder."""
    modules = sorted(_reached())
    for module in modules:
        target = _target(folder / PACKAGE, module)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _IMPORT.sub(rf"\1\2 {PACKAGE}.\3", _text(module))
        if module == "shared.packages":
            text = _GROUP.sub(rf'"{PACKAGE}.\1"', text)
        target.write_text(text, encoding="utf-8")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (folder / PACKAGE / "__init__.py").write_text(_init(), encoding="utf-8")
    (folder / "README.md").write_text(_README, encoding="utf-8")
    (folder / "LICENSE").write_bytes((PROJECT / "LICENSE").read_bytes())
    (folder / "pyproject.toml").write_text(_description(project, *_needed(modules)), encoding="utf-8")


def _reached() -> set[str]:
    """Modules that the client imports, directly or not, and the packages they lie in."""
    graph = grimp.build_graph(*_ROOTS, cache_dir=None)
    for module in _REPLACED:
        for imported in graph.find_modules_directly_imported_by(module):
            graph.remove_import(importer=module, imported=imported)
    start = {module for module in graph.modules if f"{module}.".startswith(f"{_ENTRY}.")} | _ADDED
    found = start.union(*(graph.find_upstream_modules(module) for module in start))
    return found | {module.rsplit(".", n)[0] for module in found for n in range(1, module.count(".") + 1)}


def _init() -> str:
    """The package's own module: what `volley_python.client` offers."""
    names = ", ".join(client.__all__)
    return f'"""{client.__doc__}"""\n\nfrom {PACKAGE}.{_ENTRY} import {names}\n\n__all__ = {client.__all__}\n'


def _target(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split("."))
    spec = find_spec(module)
    assert spec is not None
    return path / "__init__.py" if spec.submodule_search_locations is not None else path.with_suffix(".py")


def _text(module: str) -> str:
    spec = find_spec(module)
    if module in _REPLACED or spec is None or spec.origin is None:
        return _REPLACED.get(module, "")
    return Path(spec.origin).read_text(encoding="utf-8")


def _needed(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of the distributions that the modules import, always and with the extra."""
    imported = {name for module in modules for name in _imports(_text(module))}
    foreign = imported - {*sys.stdlib_module_names, *_ROOTS, *_ON_DEMAND}
    homes = packages_distributions()
    always, extra = (sorted(_normal(homes[name][0]) for name in some) for some in (foreign - _FULL, foreign & _FULL))
    return always, extra


def _imports(text: str) -> Iterator[str]:
    """Top-level names that a module imports, also inside functions, but not for type checkers alone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _description(project: dict[str, object], needed: Iterable[str], extra: Iterable[str]) -> str:
    bounds = {_normal(re.split(r"[^\w.-]", one)[0]): one for one in project["dependencies"]}  # type: ignore[attr-defined]
    lines, more = ("".join(f'  "{bounds.get(name, name)}",\n' for name in some) for some in (needed, extra))
    points = "\n".join(_table(group, those) for group, those in _POINTS.items())
    return f"""[project]
name = "volley-rl-client"
version = "{project["version"]}"
description = "Client of Volley: environments, episodes and records of training runs"
readme = "README.md"
license = "{project["license"]}"
requires-python = "{project["requires-python"]}"
dependencies = [
{lines}]

[project.optional-dependencies]
full = [
{more}]

{points}
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{PACKAGE}"]
"""


def _table(group: str, points: Mapping[str, str]) -> str:
    lines = [f'"{name}" = "{PACKAGE}.{point}"\n' for name, point in points.items()]
    return f'[project.entry-points."{PACKAGE}.{group}"]\n{"".join(lines)}'


if __name__ == "__main__":
    raise SystemExit(main())
