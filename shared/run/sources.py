"""Environments that a configuration names by a file or an import path.

    data.env: ./my_env.py               a file; with several classes ./my_env.py:MyEnv; also a .zip, a .whl or a folder
    data.env: my_package.envs:MyEnv     a class of a package in the present directory, or of an installed one

Invariants: such an environment gets the name NAME-DIGEST@1, with the digest of its bytes, its class and its settings,
so different code is a different environment. The configuration records the source of each name (`data.sources`) when it
is loaded, once. A package reads the bytes. No code of a source is run or imported here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import packages
from shared.errors import ConfigError

_FILE = re.compile(r"(?P<path>.+\.(?:py|zip|whl))(?::(?P<entry>[A-Za-z_][\w.:]*))?", re.DOTALL)
_IMPORT = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class FoundSource:
    """Path and class of an environment: CLASS or None for a file or folder, package.module:CLASS for a package."""

    path: Path
    entry: str | None


def is_source(env: str) -> bool:
    """True if `env` is a file or an import path rather than an environment's name."""
    return bool(_FILE.fullmatch(env) or _IMPORT.fullmatch(env)) or "/" in env


def find(env: str, base: Path | None) -> FoundSource:
    """Find a source. Raises ConfigError.

    Args: base: folder for relative paths and the first place to look for packages; None: only installed packages.
    """
    if (match := _FILE.fullmatch(env)) is not None:
        path = ((base or Path()) / Path(match["path"]).expanduser()).absolute()
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist or is not a file", "name a Python file, a .zip or .whl, or package.module:Class"
            )
        return FoundSource(path, match["entry"])
    if not _IMPORT.fullmatch(env):
        path, _, entry = env.partition(":")
        if (folder := ((base or Path()) / Path(path).expanduser()).absolute()).is_dir():
            return FoundSource(folder, entry or None)
        raise ConfigError(
            f"{env[:200]!r} is neither an environment's name nor an environment's file or folder",
            "name a folder, a file that ends in .py, .zip or .whl, or package.module:Class",
        )
    return FoundSource(_located(env.partition(":")[0].partition(".")[0], base), env)


def resolved(tree: dict[str, Any], base: Path) -> dict[str, Any] | None:
    """Replace files and import paths in a configuration's tree by names, and record them in data.sources.

    Returns None if there is none. Raises ConfigError.
    """
    data = tree["data"]
    mixture: dict[str, Any] = data.get("mixture") or {}
    wanted = {env: data.get("env_config") or {} for env in [data["env"]] if is_source(env)}
    for env, row in mixture.items():
        if env not in wanted and is_source(env):
            wanted[env] = (row.get("env_config") or {}) if isinstance(row, dict) else {}
    if not wanted:
        return None
    names, sources = dict[str, str](), dict[str, Any](data.get("sources") or {})
    identity: Callable[[FoundSource, Mapping[str, Any]], tuple[str, str]] = packages.part("source_identity")
    for env, settings in wanted.items():
        try:
            found = find(env, base)
            name, sha256 = identity(found, settings)
        except ConfigError as error:
            key = "data.env" if env == data["env"] else "data.mixture"
            raise ConfigError(f"{key}={env[:200]}: {error.detail}", error.hint) from error
        names[env] = f"{name}@1"
        sources[names[env]] = {"path": str(found.path), "entry": found.entry, "sha256": sha256}
    changed = {**data, "env": names.get(data["env"], data["env"]), "sources": sources}
    for section in ("mixture", "rewards"):
        if data.get(section):
            changed[section] = {names.get(env, env): row for env, row in data[section].items()}
    return {**tree, "data": changed}


def _located(package: str, base: Path | None) -> Path:
    """Locate the folder or file of a top-level package or module, without importing it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        spec = (PathFinder.find_spec(package, [str(base)]) if base else None) or find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or package in sys.builtin_module_names or package in sys.stdlib_module_names:
        raise ConfigError(
            f"there is no package {package!r} in {base or 'this Python'}, nor in this program's environment",
            f"install it: uv pip install --python {sys.executable} …",
        )
    folders = list(spec.submodule_search_locations or ())
    if len(folders) > 1:
        raise ConfigError(
            f"{package} is a namespace package of {len(folders)} folders", "name a package that lies in one folder"
        )
    if not folders and not spec.origin:
        raise ConfigError(f"{package} has no files")
    return Path(folders[0] if folders else str(spec.origin)).absolute()
