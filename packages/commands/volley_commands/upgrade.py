"""`volley upgrade`: say what is installed, how to upgrade it, and what that means for runs. Changes nothing."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from volley import bootstrap, wheel
from volley.printing import join_lines, print_result

_NOTES = (
    "Running services are not touched: they use the files of the version that started them.",
    "`volley up RUN` continues a run with the version that calls it: read its CHANGELOG.md first.",
)


def add(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Raises InstallError if the wheel's folder cannot be made."""
    found = describe()
    lines = [f"volley {found['version']}, {found['kind']}: {found['folder']}"]
    lines += [f"  environment {name}: {state}" for name, state in found["environments"].items()]
    lines += [f"other version: {other}; `rm -r` removes it once no run needs it" for other in found["others"]]
    print_result(found, join_lines([*lines, f"to upgrade: {found['command']}", *_NOTES]))
    return 0


def describe() -> dict[str, Any]:
    """Return version, kind of installation, folder, environments, other versions, and the command that upgrades."""
    folder, installed = wheel.project(), wheel.is_managed()
    unmade = "made when a command needs it" if installed else "not up to date: run `make install`"
    others = [one for one in wheel.folder().glob("*/") if (one / wheel.MARK).exists() and one != folder]
    return {
        "version": version(wheel.DISTRIBUTION),
        "kind": "wheel" if installed else "clone",
        "folder": str(folder),
        "environments": {
            name: "ready" if bootstrap.is_current(folder, name) else unmade for name in bootstrap.ENVIRONMENTS
        },
        "others": sorted(map(str, others)),
        "command": _command(Path(sys.prefix)) if installed else f"cd {folder} && git pull && make install",
    }


def _command(prefix: Path) -> str:
    if "archive-v0" in prefix.parts:  # uv's cache: uvx
        return "uvx --from volley-rl@latest volley …"
    return (
        f"uv tool upgrade {wheel.DISTRIBUTION}"
        if prefix.parent.name == "tools"
        else f"pip install --upgrade {wheel.DISTRIBUTION}"
    )
