"""Read YAML files of configurations, of bounded size and without duplicate keys; all errors become ConfigError."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigError
from shared.files.reading import read_file

PROJECT = Path(__file__).resolve().parents[1]
_MAX_BYTES = 2**18
_MAX_VALUES = 20_000
_MAX_LEVELS = 64
"""Limits of a configuration in a run's folder: bytes, values and nesting."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors of OmegaConf and YAML to ConfigError."""
    try:
        yield
    except yaml.YAMLError as error:
        raise ConfigError(*_yaml_mistake(what, error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not text", "give a YAML file in UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{what} is nested too deeply, or contains itself") from error
    except (ValueError, TypeError, *_errors_of_omegaconf()) as error:
        raise ConfigError(f"{what} cannot be used: {_first_line(error)}") from error


def _yaml_mistake(what: str, error: yaml.YAMLError) -> tuple[str, str]:
    """Describe an error of YAML: the line, what is wrong there, and what to write."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    at = f", line {mark.line + 1}" if mark is not None else ""
    if "'\\t'" in problem:
        return f"{what}{at} is indented with a tab, which YAML does not allow", "indent with spaces"
    hint = (
        "the file ends within a value: a bracket or quotation mark is not closed" if "<stream end>" in problem else ""
    )
    return f"{what} is not valid YAML{at}: {' '.join(problem.split())}", hint


def _errors_of_omegaconf() -> tuple[type[Exception], ...]:
    """Return OmegaConf's error classes; empty if it is not imported, since then it cannot have raised."""
    errors = sys.modules.get("omegaconf.errors")
    return () if errors is None else (errors.OmegaConfBaseException,)


def present(path: Path) -> Path:
    """Return the path, or the file of that name that comes with Volley, such as `configs/quickstart.yaml`."""
    ours = PROJECT / path
    return ours if path.parts[:1] in (("configs",), ("recipes",)) and not path.exists() and ours.exists() else path


def read_tree(path: Path, noun: str = "") -> dict[str, Any]:
    """Read a YAML or JSON file that holds a mapping; errors name it as `noun` and path. Raises ConfigError."""
    with translated(f"{noun} {path}".lstrip()):
        return _read(present(path))


class _Loader(yaml.SafeLoader):
    """YAML loader that reads dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path, _MAX_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}", _near(path)) from error
    if _values(yaml.compose(text, yaml.SafeLoader), {}) > _MAX_VALUES:
        raise ConfigError(f"config file {path} holds more than {_MAX_VALUES} values (aliases count each time)")
    tree = _Loader(text).get_single_data()
    if not isinstance(tree, dict):
        held = "is empty" if tree is None else f"holds {_KINDS.get(type(tree), 'one value')}, not a mapping of sections"
        raise ConfigError(f"config file {path} {held}", "write sections with keys, as in configs/quickstart.yaml")
    return tree


_KINDS = {list: "a list", str: "plain text"}


def _near(path: Path) -> str:
    """Hint at the file that was meant: another spelling, here or in the folder of examples, or one of a recipe."""
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("*.yaml"))[:3]
        return f"name a file in it, such as {', '.join(files)}" if files else "give an existing YAML file with --config"
    folders = [path.parent, Path("configs")]
    files = [str(file) for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")]
    recipes = {file.parent.name: str(file.relative_to(PROJECT)) for file in PROJECT.glob("recipes/*/config.yaml")}
    near = (
        [file for file in files if Path(file).name == path.name]
        or [file for name, file in recipes.items() if name.rpartition("_")[2] == path.stem.rpartition("_")[2]]
        or get_close_matches(str(path), [*files, *recipes.values()], n=1)
    )
    return f"did you mean {near[0]}?" if near else "give an existing YAML file with --config"


def _values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Count the values below a node as if aliases were expanded, without expanding them.

    Raises RecursionError for a node that contains itself, and YAMLError for a duplicate key.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        children = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    seen = set[str]()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key.value[:100]!r} is given twice", problem_mark=key.start_mark
            )
        seen.add(key.value)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_plain(tree: Any, levels: int = _MAX_LEVELS) -> bool:
    """True if a tree holds only JSON values, at most `levels` deep, and nothing that OmegaConf would interpolate."""
    if levels == 0:
        return False
    if isinstance(tree, dict):
        return all(type(key) is str and is_plain(value, levels - 1) for key, value in tree.items())
    if isinstance(tree, list):
        return all(is_plain(value, levels - 1) for value in tree)
    return type(tree) in (int, float, bool, type(None)) or (type(tree) is str and "${" not in tree and tree != "???")
