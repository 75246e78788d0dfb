"""`volley sft` and `volley dpo`: supervised training as its own run.

It is stopped, resumed and watched like any other run. It needs only the trainer, and the environment service if that
makes the data.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared import config
from shared.config import LoadedConfig
from shared.config_files import read_tree
from shared.errors import ConfigError
from volley.commands import train
from volley.local import stack

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*=")


@dataclass(frozen=True, slots=True)
class SftArguments:
    """Arguments of the command line; the configuration supplies those that are not given."""

    data: Sequence[Path]
    model: str | None
    held_out: Sequence[Path]
    epochs: int | None
    configs: Sequence[str]
    overrides: Sequence[str]


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
    """Raises as `main`."""
    given: list[str] = arguments.overrides
    overrides = [one for one in given if _OVERRIDE.match(one) and not Path(one).exists()]
    return main(
        arguments.called,
        SftArguments(
            data=[Path(one) for one in given if one not in overrides],
            model=arguments.model,
            held_out=arguments.eval,
            epochs=arguments.epochs,
            configs=arguments.config,
            overrides=overrides,
        ),
    )


def main(mode: Literal["sft", "dpo"], arguments: SftArguments, seams: stack.StackSeams = stack.REAL) -> int:
    """Start or continue the run. Raises VolleyError; otherwise returns the exit code."""
    return train.start_or_continue(config.rooted(configured(mode, arguments), Path.cwd()), seams)


def configured(mode: Literal["sft", "dpo"], given: SftArguments) -> LoadedConfig:
    """Return the configuration of the arguments. Raises ConfigError."""
    tree: dict[str, Any] = {"mode": mode, "sft": {}}
    if given.data:
        tree["sft"]["train"] = [str(path) for path in given.data]
    if given.held_out:
        tree["sft"]["eval"] = [str(path) for path in given.held_out]
    if given.epochs is not None:
        tree["sft"] |= {"epochs": given.epochs, "max_steps": 0}
    if given.model is not None:
        tree["model"] = {"path": given.model}
    elif not given.configs and not any(one.startswith("model.path=") for one in given.overrides):
        raise ConfigError("no model is named", f"run `volley {mode} DATA --model FOLDER`, or add --config FILE.yaml")
    if not any(one.startswith("run.name=") for one in given.overrides):
        tree["run"] = {"name": _name(mode, given.configs)}
    return config.load(given.configs, given.overrides, given=tree)


def _name(mode: str, configs: Sequence[str]) -> str:
    """Name of the run: `NAME-sft`, because a configuration's own name belongs to its RL run."""
    named = [read_tree(Path(path)).get("run") or {} for path in configs]
    names = [str(one["name"]) for one in named if isinstance(one, dict) and one.get("name")]
    return f"{names[-1]}-{mode}" if names else mode
