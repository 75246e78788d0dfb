"""`volley replay`: train archived groups again in the trainer's virtual environment, and print the differences.

The program prints one JSON line per step, then the result or an error (see volley_proof.replay.steps).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared import config
from shared.errors import ConfigError
from shared.run import trust
from shared.run.folder import RunFolder
from volley.layout import variables_of
from volley.local import trainer_program
from volley.printing import print_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_run_dir


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--from-step", type=int, metavar="K", help="step of the checkpoint to start from")
    parser.add_argument(
        "--refused",
        metavar="VERSION",
        help="replay a step that was refused because it was not finite, instead of --from-step",
    )
    parser.add_argument("--to-step", type=int, metavar="M", help="last step (default: that of the newest checkpoint)")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="write the trainer's log-probability and the advantage of every token, for the dashboard",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(
        arguments.run_dir,
        arguments.from_step,
        arguments.to_step,
        arguments.refused,
        tokens=arguments.tokens,
    )


def main(run_dir: Path, first: int | None, last: int | None, refused: str | None, *, tokens: bool = False) -> int:
    """Print the result. Exit code 0 if every step, or the refused one, was reproduced, else 1.

    Raises ConfigError, VolleyError.
    """
    if (first is None) == (refused is None):
        raise ConfigError("give either --from-step K or --refused VERSION")
    if tokens and refused is not None:
        raise ConfigError("--tokens needs --from-step", "values of a refused step are not kept")
    what = ["--refused", refused] if refused is not None else ["--from-step", str(first)]
    what += ["--tokens"] if tokens else []
    result = replayed(RunFolder(run_dir.absolute()), what, last)
    print_result(result, lambda: format_result(result))
    return 0 if result["ok"] else 1


def replayed(folder: RunFolder, what: list[str], last: int | None, *, show: bool = True) -> dict[str, Any]:
    """Result of volley_proof.replay.steps. Raises ConfigError, VolleyError.

    Args:
        what: its arguments that name the first or the refused step.
        show: print one line per step.
    """
    folder.check()
    trust.check(folder)
    cpu = config.load([folder.config]).config.rollout.engine.device == "cpu"
    arguments = [str(folder.path), *what, *([] if last is None else ["--to-step", str(last)])]

    def print_step(line: Mapping[str, Any]) -> None:
        if "step" in line:
            tell(f"after step {line['step']}")
        if show and "loss" in line:
            print_lines(f"step {line['step']}: loss {line['loss']:.6g}, {line['compared']}")

    variables = variables_of("trainer", cpu=cpu)
    with working("training again") as tell:
        return trainer_program.run("volley_proof.replay.steps", arguments, variables, print_step)


def format_result(result: dict[str, Any]) -> str:
    """Result as one line."""
    if "refused" in result:
        now, then = (", ".join(result[key]) or "nothing" for key in ("refused", "recorded"))
        return (
            f"not finite again: {now}"
            if result["ok"]
            else f"DIVERGED: not finite now: {now}; when it was refused: {then}"
        )
    compared = (
        f"{result['steps']} steps, {result['compared_checkpoints']} compared with checkpoints,"
        f" {result['compared_checksums']} with commit records, {result['compared_metrics']} with metrics"
    )
    first = result["first_divergence"]
    if first is None:
        return f"{compared}: bit-identical"
    return f"{compared}: DIVERGED at step {first['step']}, {first['what']} {first['name']}: {_amount(first)}"


def _amount(divergence: dict[str, Any]) -> str:
    amount = divergence["max_abs_diff"]
    return "differs in shape, or is not finite" if amount is None else f"max |Δ| {amount:.3g}"
