"""Options of commands for a run on the user's own data. The package volley-rl-data brings them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shared import config, packages
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.run.folder import RunFolder

PART = "own_data.options"


class OwnData(Protocol):
    """The options, and the configuration that they make."""

    def add(self, parser: argparse.ArgumentParser) -> None: ...

    def configured(self, arguments: argparse.Namespace, given: Sequence[str]) -> LoadedConfig | None:
        """Return the configuration; None without --data and --env. Args: given: the model and overrides.

        Raises ConfigError.
        """
        ...


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command, if the package is installed."""
    if (part := _part()) is not None:
        part.add(parser)


def configured(arguments: argparse.Namespace, given: Sequence[str]) -> LoadedConfig | None:
    """Return the configuration of a run on own data; None if the options do not ask for one. Raises ConfigError."""
    return None if (part := _part()) is None else part.configured(arguments, given)


def load(arguments: argparse.Namespace) -> LoadedConfig:
    """Load the configuration that a command's options --config, or --data and --reward, and its settings make.

    A folder given with --config is that of a run. Raises ConfigError.
    """
    if (loaded := configured(arguments, arguments.overrides)) is not None:
        return loaded
    if not arguments.config:
        raise ConfigError(
            "neither --config, --data nor --env is given",
            "add --config FILE.yaml, MODEL --data FILE --reward FILE.py, or MODEL --env FILE",
        )
    return config.load(files_of(arguments.config), arguments.overrides)


def files_of(given: Sequence[str]) -> list[Path]:
    """Configuration files that --config names: files, or folders of runs."""
    return [RunFolder(Path(one)).config if Path(one).is_dir() else Path(one) for one in given]


def _part() -> OwnData | None:
    return packages.part(PART, required=False)
