"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDERS = ("run_dir", "run", "target", "targets", "rest")
"""Arguments that name folders of runs."""


def add_run_dir(part: argparse.ArgumentParser) -> None:
    part.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    add_trust(part)


def add_vary(part: argparse.ArgumentParser, help: str) -> None:
    """Add --vary, which makes a run for each value of a setting. `help` says what the runs are."""
    part.add_argument("--vary", action="append", nargs="+", default=[], metavar=("KEY", "VALUE"), help=help)


def add_trust(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "--trust",
        action="store_true",
        help="trust the run's folder as your own: use the files, addresses and programs that it names",
    )


def add_api_key(group: argparse._MutuallyExclusiveGroup, help: str) -> None:
    """Add --api-key-file and --api-key, of which only the first hides the key from the other users of the machine."""
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"file with the API key, mode 0600: {help}")
    group.add_argument("--api-key", metavar="KEY", help="the API key itself; every user of the machine can list it")


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """Return the API key of the command line, if there is one. Raises ConfigError."""
    from shared.web.access import read_secret

    path: Path | None = arguments.api_key_file
    return arguments.api_key if path is None else read_secret(path, "--api-key-file")


def accept(arguments: argparse.Namespace) -> None:
    """Trust the run folders on the command line if --trust is given."""
    if not getattr(arguments, "trust", False):
        return
    from shared.run import trust
    from shared.run.folder import RunFolder
    from volley.runs import addresses

    named = [value for name in FOLDERS if (value := getattr(arguments, name, None))]
    folders = [path for value in named for path in (value if isinstance(value, list) else [value])]
    for path in folders:
        trust.accept(RunFolder(Path(str(path).partition("@")[0] if not Path(path).exists() else path).absolute()))
    if not folders:
        trust.accept(addresses.newest_run())
