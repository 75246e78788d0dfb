"""Options of commands for a run on the user's own data. The package volley-rl-data brings them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from shared import packages
from shared.config import LoadedConfig

PART = "own_data.options"


class OwnData(Protocol):
    """The options, and the configuration that they make."""

    def add(self, parser: argparse.ArgumentParser) -> None: ...

    def configured(self, arguments: argparse.Namespace, given: Sequence[str]) -> LoadedConfig | None:
        """Return the configuration, None without --data. Args: given: the model and overrides. Raises ConfigError."""
        ...


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command, if the package is installed."""
    if (part := _part()) is not None:
        part.add(parser)


def configured(arguments: argparse.Namespace, given: Sequence[str]) -> LoadedConfig | None:
    """Return the configuration of a run on own data; None if the options do not ask for one. Raises ConfigError."""
    return None if (part := _part()) is None else part.configured(arguments, given)


def _part() -> OwnData | None:
    return packages.part(PART, required=False)
