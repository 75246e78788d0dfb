"""`volley export`: write a run's weights as a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.models.origin import LATEST
from shared.run import trust
from shared.run.folder import RunFolder
from volley.layout import variables_of
from volley.local import trainer_program
from volley.printing import join_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_run_dir


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to make")
    parser.add_argument("--version", default=LATEST, metavar="VERSION", help="e000001-s000020 (default: the newest)")
    parser.add_argument(
        "--adapter", action="store_true", help="with trainer.lora: write only the adapters, as PEFT saves them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir, arguments.folder, arguments.version, adapter=arguments.adapter)


def main(run_dir: Path, folder: Path, version: str, *, adapter: bool = False) -> int:
    """Write `folder` with a program of the trainer's virtual environment. Raises ConfigError, WeightsError."""
    if (run := RunFolder(run_dir.absolute())).config.exists():
        trust.check(run)
    arguments = [str(run_dir.absolute()), str(folder.absolute()), "--version", version]
    arguments += ["--adapter"] if adapter else []
    arguments += ["--trust"] if trust.is_accepted(run) else []
    variables = variables_of("trainer", cpu=True)
    with working(f"exporting to {folder}"):
        result = trainer_program.run("services.trainer.checkpoints.export", arguments, variables)
    lines = [f"{folder} holds {result['version']} of {run_dir}: {result['tensors']} tensors, {result['dtype']}"]
    lines += [f"{level}: {text}" for level in ("warning", "note") if (text := result.get(level))]
    print_result({"folder": folder, **result}, join_lines(lines))
    return 0
