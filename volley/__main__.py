"""The `volley` command and its table of commands. Only the module of the called command is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from shared.errors import ConfigError
from volley.printing import is_json, use_json
from volley.program import run_program
from volley.run_arguments import accept


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `add(parser)`, which names its arguments, and `run(arguments)`, which returns the exit code."""

    module: str
    help: str
    example: str
    aliases: tuple[str, ...] = ()


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Train": {
        "quickstart": Command("commands.quickstart", "train a tiny model in a minute", "quickstart"),
        "train": Command(
            "commands.train",
            "start or continue training, with all services on this machine",
            "train --config configs/quickstart.yaml run.name=mine",
            aliases=("up",),
        ),
        "plan": Command(
            "commands.plan",
            "devices, memory, hand-over, disk and cost of a run, before it starts",
            "plan --config configs/quickstart.yaml",
        ),
        "sft": Command(
            "commands.sft",
            "train on conversations: files, or an environment's demonstrations",
            "sft talks.jsonl run.name=talks --model models/smollm2",
        ),
        "dpo": Command(
            "commands.sft",
            "train on preference pairs (direct preference optimization)",
            "dpo pairs.jsonl run.name=pairs --model models/smollm2",
        ),
        "launch": Command(
            "commands.launch",
            "write a script that starts a run on Slurm, with SkyPilot or on TPU VMs",
            "launch slurm --config configs/quickstart.yaml --nodes 3",
        ),
        "node": Command(
            "commands.node",
            "run the services of one host of a run on several hosts",
            "node launch/quickstart --hosts host0,host1 --index 0",
        ),
        "follow": Command(
            "commands.follow",
            "watch a run whose services run elsewhere, and report at its end",
            "follow --config configs/quickstart.yaml",
        ),
        "tinker": Command(
            "commands.tinker",
            "train a model for clients of Tinker's interface (the tinker SDK)",
            "tinker models/smollm2",
        ),
    },
    "Look": {
        "dashboard": Command(
            "commands.dashboard", "look at runs in a browser: curves, services, every token", "dashboard runs"
        ),
        "status": Command(
            "commands.status", "readiness, weight versions, who waits for whom", "status runs/quickstart --watch"
        ),
        "report": Command("reporting.report", "table, plot.png and summary.json of a run", "report runs/quickstart"),
        "compare": Command(
            "commands.compare",
            "several runs in a table and one plot; with --vary, train them first",
            "compare runs/a runs/b",
        ),
        "track": Command(
            "commands.track",
            "report a run to TensorBoard, W&B, trackio or MLflow",
            "track runs/quickstart --to tensorboard",
        ),
        "trajectories": Command(
            "commands.trajectories",
            "search, read and export the episodes of a run",
            "trajectories runs/quickstart --reward-max 0 --sort tokens",
        ),
        "eval": Command(
            "commands.evaluate",
            "evaluate a run's version or a model on held-out tasks, without training",
            "eval runs/quickstart --json result.json",
        ),
    },
    "Prove": {
        "verify": Command("verify.command", "prove that no ticket was lost or trained twice", "verify runs/quickstart"),
        "replay": Command(
            "commands.replay",
            "train archived groups again, and compare bit for bit",
            "replay runs/quickstart --from-step 14",
        ),
        "fork": Command(
            "commands.fork",
            "train archived groups again under other settings, as a new run, without generating",
            "fork runs/quickstart algorithm.name=dppo --from 8",
        ),
        "reverify": Command(
            "reverify.command",
            "replay archived episodes in today's environments, and compare rewards",
            "reverify runs/quickstart",
        ),
    },
    "Models and environments": {
        "env": Command(
            "commands.environments", "write, test, submit and manage your own environments", "env init maze.py"
        ),
        "model": Command("commands.model", "download a model", "model get smollm2 models/smollm2"),
        "serve": Command("commands.serve", "serve a model or a run's version by HTTP, alone", "serve runs/quickstart"),
        "export": Command(
            "commands.export",
            "write a run's weights as a folder that transformers loads",
            "export runs/quickstart models/mine",
        ),
    },
    "This machine": {
        "doctor": Command("commands.doctor", "check what is installed and usable here", "doctor"),
        "config": Command(
            "commands.configuration",
            "a configuration with the source of each value, or its JSON schema",
            "config show --config configs/quickstart.yaml --set",
        ),
        "completion": Command(
            "commands.completion",
            "a script that completes commands and runs in bash, zsh or fish",
            'eval "$(volley completion bash)"',
        ),
        "access": Command(
            "commands.access",
            "addresses and token files of a run, as shell variables",
            'eval "$(volley access runs/quickstart)"',
        ),
    },
}
COMMANDS: Mapping[str, Command] = {name: one for group in GROUPS.values() for name, one in group.items()}


class _CommandParser(argparse.ArgumentParser):
    """Parser of one command; if JSON is wanted, wrong usage is a ConfigError instead of text."""

    def error(self, message: str) -> NoReturn:
        if is_json():
            raise ConfigError(message, f"`{self.prog} --help` lists the arguments")
        super().error(message)


class _Parser(_CommandParser):
    """Parser of the whole command line; its help lists the commands by group, each with an example."""

    def format_help(self) -> str:
        width = max(map(len, COMMANDS))
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for group, commands in GROUPS.items():
            lines += ["", f"{group}:"]
            for name, command in commands.items():
                lines += [f"  {name:{width}}  {command.help}", f"  {'':{width}}    {_example(command)}"]
        return "\n".join([*lines, "", f"`{self.prog} COMMAND --help` lists the arguments of a command.", ""])


def _example(command: Command) -> str:
    return command.example if "volley " in command.example else f"volley {command.example}"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `volley`."""
    run_program(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    use_json("--json" in given and not {"-h", "--help"} & set(given))  # for errors of the parser
    arguments = parse_arguments(given)
    use_json(arguments.json is True)
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
    whole = _Parser(prog="volley", description="Reinforcement-learning post-training for language-model agents.")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        part = commands.add_parser(
            name, aliases=command.aliases, help=command.help, epilog=f"example: {_example(command)}"
        )
        if called is None or called in (name, *command.aliases):
            module = import_module(f"volley.{command.module}")
            module.add(part)
            _add_json(part)
            part.set_defaults(command=module.run, called=name)
    return whole


def _add_json(part: argparse.ArgumentParser) -> None:
    """Give a command, or each of its own commands, the option --json, unless it defines one."""
    if inner := subcommands(part):
        for one in inner.values():
            _add_json(one)
    elif "--json" not in part._option_string_actions:
        part.add_argument("--json", action="store_true", help="print the result, or the error, as JSON")


def subcommands(part: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Parsers of a command's own commands, by name; none if it has none."""
    found = [action for action in part._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0].choices if found else {}


if __name__ == "__main__":
    main()
