"""The arguments of `volley sft` and `volley dpo`."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Literal

type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]
_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*=")


def add(commands: _Commands) -> None:
    sft = commands.add_parser("sft", help="train on conversations: files, or an environment's demonstrations")
    _arguments(sft, "JSONL, Parquet, or a folder of them; none: demonstrations of data.env")
    sft.set_defaults(command=lambda arguments: _run("sft", arguments))
    dpo = commands.add_parser("dpo", help="train on preference pairs (direct preference optimization)")
    _arguments(dpo, "JSONL, Parquet, or a folder of them, with chosen and rejected")
    dpo.set_defaults(command=lambda arguments: _run("dpo", arguments))


def _arguments(parser: argparse.ArgumentParser, data: str) -> None:
    parser.add_argument("overrides", nargs="*", metavar="DATA | key.path=value", help=f"{data}; and values that win")
    parser.add_argument("--model", metavar="FOLDER", help="as model.path: also a hub id, or a run's RUN@VERSION")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml", help="given again, the later file wins"
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


def _run(mode: Literal["sft", "dpo"], arguments: argparse.Namespace) -> int:
    from services.cli.commands import sft

    given: list[str] = arguments.overrides
    overrides = [one for one in given if _OVERRIDE.match(one) and not Path(one).exists()]
    return sft.main(
        mode,
        sft.SftArguments(
            data=[Path(one) for one in given if one not in overrides],
            model=arguments.model,
            held_out=arguments.eval,
            epochs=arguments.epochs,
            configs=arguments.config,
            overrides=overrides,
        ),
    )
