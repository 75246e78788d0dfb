"""The `volley` command: a table of commands. The module of the one that is called is imported, and no other."""

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
        "train, or go on training: starts all services on this machine, stops them at the end",
        aliases=("up",),
    ),
    "quickstart": Command("commands.quickstart", "train with configs/quickstart.yaml"),
    "follow": Command("commands.follow", "watch a run whose services others started, and report at its end"),
    "sft": Command("commands.sft", "train on conversations: files, or an environment's demonstrations"),
    "dpo": Command("commands.sft", "train on preference pairs (direct preference optimization)"),
    "env": Command("commands.environments", "write, try, submit and look after environments of your own"),
    "model": Command("commands.model", "get a model"),
    "export": Command("commands.export", "write a run's weights as a folder that transformers loads"),
    "report": Command("reporting.report", "make summary.json, the plot and the table of a run"),
    "compare": Command(
        "commands.compare", "show runs beside each other, in a table and one picture; with --vary, train them first"
    ),
    "status": Command("commands.status", "show the services of a run: readiness, weight versions, who waits for whom"),
    "access": Command("commands.access", "print addresses and token files of a running run, for a shell to evaluate"),
    "verify": Command("verify.command", "prove that no ticket of a run was lost or trained twice, from its folder"),
    "replay": Command(
        "commands.replay", "train archived groups again from a retained checkpoint, and compare bit for bit"
    ),
    "reverify": Command(
        "reverify.command", "play archived episodes to the environments of today: what their rewards would be now"
    ),
    "eval": Command(
        "commands.evaluate",
        "measure a run's version or a model on the held-out tasks of a configuration, without training",
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
    """The command line; argparse takes no further positional arguments after an option that follows the first ones."""
    given = sys.argv[1:] if argv is None else argv
    whole = parser(given[0] if given else "")
    arguments, late = whole.parse_known_args(given)
    if late and not (hasattr(arguments, "overrides") and all("=" in one and one[0] != "-" for one in late)):
        whole.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        arguments.overrides = [*arguments.overrides, *late]
    return arguments


def parser(called: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, with the arguments of one command, or of all."""
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
