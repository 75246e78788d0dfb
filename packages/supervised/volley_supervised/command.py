"""`volley sft` and `volley dpo`: supervised training as its own run.

It is stopped, resumed and watched like any other run. It needs only the trainer, and the environment service if that
makes the data.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path

from volley.commands import train
from volley.local import stack
from volley_supervised.runs import configured

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*=")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="DATA | key.path=value",
        help="conversations (dpo: with chosen and rejected) as JSONL, Parquet or a folder of them (default:"
        " demonstrations of data.env); settings that override the files",
    )
    parser.add_argument("--model", metavar="FOLDER", help="sets model.path: a folder, a hub id, or RUN@VERSION")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml", help="configuration; repeatable, later files win"
    )
    parser.add_argument(
        "--eval", action="append", default=[], type=Path, metavar="DATA", help="held-out data to measure the loss on"
    )
    parser.add_argument("--epochs", type=_epochs, metavar="N", help="passes over the data (default: 1)")


def _epochs(text: str) -> int:
    """Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if (n := int(text)) >= 1:
            return n
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")


def run(arguments: argparse.Namespace) -> int:
    """Start or continue the run. Raises VolleyError; otherwise returns the exit code."""
    given: list[str] = arguments.overrides
    overrides = [one for one in given if _OVERRIDE.match(one) and not Path(one).exists()]
    loaded = configured(
        arguments.called,
        [Path(one) for one in given if one not in overrides],
        arguments.model,
        held_out=arguments.eval,
        epochs=arguments.epochs,
        configs=arguments.config,
        overrides=overrides,
    )
    return train.start_or_continue(loaded, stack.REAL)
