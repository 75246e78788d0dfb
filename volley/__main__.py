"""The `volley` command and its table of commands. Only the module of the called command is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from volley.program import run_program
from volley.run_arguments import accept


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `add(parser)`, which names its arguments, and `run(arguments)`, which returns the exit code."""

    module: str
    help: str
    aliases: tuple[str, ...] = ()


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "commands.train",
        "start or continue training: starts all services on this machine and stops them at the end",
        aliases=("up",),
    ),
    "quickstart": Command("commands.quickstart", "train with configs/quickstart.yaml"),
    "follow": Command("commands.follow", "watch a run whose services run elsewhere, and report at its end"),
    "sft": Command("commands.sft", "train on conversations: files, or an environment's demonstrations"),
    "dpo": Command("commands.sft", "train on preference pairs (direct preference optimization)"),
    "env": Command("commands.environments", "write, test, submit and manage your own environments"),
    "model": Command("commands.model", "download a model"),
    "serve": Command("commands.serve", "serve a model or a run's version by HTTP, alone"),
    "tinker": Command("commands.tinker", "train a model for clients of Tinker's interface (the tinker SDK)"),
    "export": Command("commands.export", "write a run's weights as a folder that transformers loads"),
    "report": Command("reporting.report", "write a run's summary.json and plot, and print its table"),
    "compare": Command("commands.compare", "compare runs in a table and one plot; with --vary, train them first"),
    "dashboard": Command(
        "commands.dashboard", "look at runs in a browser: curves, services, every token of every episode"
    ),
    "track": Command("commands.track", "report a run to TensorBoard, W&B, trackio or MLflow, live or afterwards"),
    "status": Command("commands.status", "show the services of a run: readiness, weight versions, who waits for whom"),
    "config": Command(
        "commands.configuration", "show a configuration with the source of each value, or its JSON schema"
    ),
    "doctor": Command("commands.doctor", "check what is installed and usable on this machine"),
    "access": Command("commands.access", "print a running run's addresses and token files as shell variables"),
    "verify": Command("verify.command", "prove that no ticket of a run was lost or trained twice, from its folder"),
    "replay": Command(
        "commands.replay", "train archived groups again from a retained checkpoint, and compare bit for bit"
    ),
    "reverify": Command(
        "reverify.command", "replay archived episodes in the current environments, and compare their rewards"
    ),
    "eval": Command(
        "commands.evaluate",
        "evaluate a run's version or a model on a configuration's held-out tasks, without training",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `volley`."""
    run_program(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = parse_arguments(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    accept(arguments)
    return command(arguments)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    argparse rejects positional arguments that follow an option; `key.path=value` overrides may come after one.
    """
    given = sys.argv[1:] if argv is None else argv
    whole = parser(given[0] if given else "")
    arguments, late = whole.parse_known_args(given)
    if late and not (hasattr(arguments, "overrides") and all("=" in one and one[0] != "-" for one in late)):
        whole.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        arguments.overrides = [*arguments.overrides, *late]
    return arguments


def parser(called: str | None = None) -> argparse.ArgumentParser:
    """Parser of the whole command line, with the arguments of the command `called`, or of all."""
    whole = argparse.ArgumentParser(
        prog="volley", description="Reinforcement-learning post-training for language-model agents."
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        part = commands.add_parser(name, aliases=command.aliases, help=command.help)
        if called is None or called in (name, *command.aliases):
            module = import_module(f"volley.{command.module}")
            module.add(part)
            part.set_defaults(command=module.run, called=name)
    return whole


if __name__ == "__main__":
    main()
