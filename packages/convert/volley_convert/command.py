"""`volley export`: write a run's weights as a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.errors import ConfigError
from shared.models.origin import LATEST
from shared.run import trust
from shared.run.folder import RunFolder
from volley.layout import variables_of
from volley.local import trainer_program
from volley.printing import join_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_trust


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN|RUN@VERSION", help="a run's newest or given version")
    add_trust(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to make")
    parser.add_argument("--version", metavar="VERSION", help="the same as RUN@VERSION: e000001-s000020")
    parser.add_argument(
        "--adapter", action="store_true", help="with trainer.lora: write only the adapters, as PEFT saves them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(*named(arguments.run_dir, arguments.version), arguments.folder, adapter=arguments.adapter)


def named(run: Path, version: str | None) -> tuple[Path, str]:
    """Return the folder and the version that RUN or RUN@VERSION and --version name. Raises ConfigError."""
    name, at, of_name = str(run).rpartition("@")
    if not at or run.is_dir():
        return run, version or LATEST
    if not of_name:
        raise ConfigError(f"{run} names no version", f"write {name}@VERSION, {name}@{LATEST} or {name}")
    if version not in (None, of_name):
        raise ConfigError(f"{run} and --version {version} name two versions", "give one of them")
    return Path(name), of_name


def main(run_dir: Path, version: str, folder: Path, *, adapter: bool = False) -> int:
    """Write `folder` with a program of the trainer's virtual environment. Raises ConfigError, WeightsError."""
    if (run := RunFolder(run_dir.absolute())).config.exists():
        trust.check(run)
    arguments = [str(run_dir.absolute()), str(folder.absolute()), "--version", version]
    arguments += ["--adapter"] if adapter else []
    arguments += ["--trust"] if trust.is_accepted(run) else []
    variables = variables_of("trainer", cpu=True)
    with working(f"exporting to {folder}"):
        result = trainer_program.run("volley_convert.export", arguments, variables)
    lines = [f"{folder} holds {result['version']} of {run_dir}: {result['tensors']} tensors, {result['dtype']}"]
    lines += [f"{level}: {text}" for level in ("warning", "note") if (text := result.get(level))]
    print_result({"folder": folder, **result}, join_lines(lines))
    return 0
