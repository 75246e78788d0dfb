"""`volley quickstart`: train a new run with configs/quickstart.yaml, and verify it."""

from __future__ import annotations

import argparse

from volley.commands import train
from volley.layout import PROJECT

CONFIG = str(PROJECT / "configs" / "quickstart.yaml")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the file")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `train.main`."""
    return train.main([CONFIG], train.fresh_name([CONFIG], arguments.overrides), prove=True)
