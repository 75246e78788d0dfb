"""The `volley` command and its table of commands. Only the module of the called command is imported."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from shared import packages
from shared.errors import ConfigError, VolleyError
from shared.visible import quoted, shortened
from volley import wheel
from volley.bootstrap import InstallError
from volley.command import Command
from volley.printing import outlive_output, use_json
from volley.program import run_program
from volley.run_arguments import accept

_GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Train": {
        "quickstart": Command(
            "volley.commands.quickstart", "train a tiny model in a minute", "quickstart", outlives_output=True
        ),
        "train": Command(
            "volley.commands.train",
            "start or continue training, with all services on this machine",
            "train --config configs/quickstart.yaml run.name=mine",
            outlives_output=True,
        ),
        "up": Command(
            "volley.commands.train", "start or continue the run of a folder", "up runs/quickstart", outlives_output=True
        ),
    },
    "Look": {},
    "Prove": {},
    "Models and environments": {},
    "This machine": {},
}


@cache
def command_groups() -> Mapping[str, Mapping[str, Command]]:
    """Return the commands of core and packages, by their group in `volley --help`. Raises ConfigError."""
    groups = {group: dict(commands) for group, commands in _GROUPS.items()}
    for name, command in packages.loaded(packages.COMMANDS).items():
        if any(name in commands for commands in groups.values()):
            raise ConfigError(f"a package brings the command {name}, which there is already")
        groups.setdefault(command.group, {})[name] = command
    return groups


def all_commands() -> Mapping[str, Command]:
    """Return all commands, by name. Raises ConfigError."""
    return {name: command for group in command_groups().values() for name, command in group.items()}


class _CommandParser(argparse.ArgumentParser):
    """Parser of one command; wrong usage is a ConfigError."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError with the nearest choice, if one is near, instead of all."""
        if isinstance(action, argparse._SubParsersAction) and (owner := packages.missing(str(value))):
            raise argparse.ArgumentError(action, f"{value}: {owner}")
        choices = [str(one) for one in action.choices or ()]
        if near := get_close_matches(str(value), choices if value not in choices else (), n=1, cutoff=0.7):
            raise argparse.ArgumentError(action, f"{value!r} is unknown: did you mean {near[0]}?")
        if isinstance(action, argparse._SubParsersAction) and value not in choices:
            raise argparse.ArgumentError(action, f"{value!r} is unknown; commands are {shortened(choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        of_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        text = message.removeprefix("argument COMMAND: ").replace("the following arguments are required: ", "missing: ")
        more = f"`{self.prog} --help` lists the {'commands' if of_commands else 'arguments'}"
        raise ConfigError(text, f"{self.epilog}; {more}" if text.startswith("missing: ") and self.epilog else more)


class _Parser(_CommandParser):
    """Parser of the whole command line; its help lists the commands by group, each with an example."""

    def format_help(self) -> str:
        width = max(map(len, all_commands()))
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for group, members in command_groups().items():
            lines += ["", f"{group}:"]
            for name, command in members.items():
                lines += [f"  {name:{width}}  {command.help}", f"  {'':{width}}    {_example(command)}"]
        return "\n".join([*lines, "", f"`{self.prog} COMMAND --help` lists the arguments of a command.", ""])


def _example(command: Command) -> str:
    return command.example if "volley " in command.example else f"volley {command.example}"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `volley`."""
    run_program(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(given: Sequence[str]) -> int:
    if not given or given[0] == "help":
        given = [*given[1:], "--help"]
    use_json("--json" in given and not {"-h", "--help"} & set(given))  # for errors of the parser
    try:
        wheel.enter(given)
    except InstallError as error:
        raise VolleyError(str(error)) from error
    arguments = parse_arguments(given)
    use_json(arguments.json is True)
    command: Callable[[argparse.Namespace], int] = arguments.command
    outlive_output(arguments.outlives_output)
    accept(arguments)
    return command(arguments)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    argparse rejects positional arguments that follow an option; `key.path=value` overrides may come after one. They may
    also be written like options, with dashes.
    """
    given = [_setting(one) for one in (sys.argv[1:] if argv is None else argv)]
    whole = parser(given[0] if given else "")
    _check_option(whole, given[:1])
    arguments, late = whole.parse_known_args(given)
    takes = next((name for name in ("overrides", "rest") if hasattr(arguments, name)), None)
    if takes and (wrong := [one for one in late if "=" not in one]) and not any(one[0] == "-" for one in late):
        from shared.config_mistakes import check_form

        check_form(late[late.index(wrong[0]) :])
    if late and not (takes and all("=" in one and one[0] != "-" for one in late)):
        meant = [one.lstrip("-") for one in late if re.match(r"--\w+\.\w", one)]
        told = f": settings have no dashes, write {meant[0]}{'' if '=' in meant[0] else '=VALUE'}" if meant else ""
        raise ConfigError(
            f"unrecognized arguments: {' '.join(late)}{told}", _of_command(whole, arguments, late, given, takes)
        )
    if late and takes:
        setattr(arguments, takes, [*getattr(arguments, takes), *late])
    return arguments


def _check_option(whole: argparse.ArgumentParser, first: Sequence[str]) -> None:
    """Raise ConfigError for an unknown option before the command."""
    options = [one for one in whole._option_string_actions if one.startswith("--")]
    if first and first[0].startswith("--") and not any(one.startswith(first[0]) for one in options):
        near = get_close_matches(first[0], options, n=1)
        hint = f"did you mean {near[0]}?" if near else f"`{whole.prog} --help` lists the commands; options follow them"
        raise ConfigError(f"unknown option {first[0]}", hint)


_OF_DATA = ("--data", "--reward", "--env", "--tools", "--columns", "--eval-data", "--eval-share")
"""Options that a package brings to commands of the core."""


def _of_command(
    whole: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    late: Sequence[str],
    given: Sequence[str],
    takes: str | None,
) -> str:
    """Hint at the option or the setting that was meant, or at the command's help.

    Args:
        late: arguments that the parser does not know.
        given: the whole command line.
        takes: name of the parser's argument that takes settings.
    """
    called = getattr(arguments, "called", "")
    part = subcommands(whole).get(called)
    options = [one for one in getattr(part, "_option_string_actions", ()) if one.startswith("--")]
    wrong = next((one for one in late if re.match(r"--?\w\w", one)), "")
    name, equals, value = wrong.partition("=")
    if wrong and not equals:
        value = next(iter(given[given.index(wrong) + 1 :]), "")
    name = f"--{name.lstrip('-')}" if wrong else ""
    if name in _OF_DATA and (absent := packages.missing("own_data.options")):
        return f"{name}: {absent}"
    if name in options:  # given with one dash
        return f"did you mean {name}?"
    if takes and name and (meant := _setting_of(name, "" if value.startswith("--") else value, takes, called)):
        return meant
    if near := get_close_matches(name, [one for one in options if one != "--help"], n=1):
        return f"did you mean {near[0]}?"
    return f"`{whole.prog} {called} --help` lists the arguments"


def _setting_of(option: str, value: str, takes: str, called: str) -> str | None:
    """Say how to write a setting that is given as an option of command `called`; None if there is no such setting."""
    from shared.config_mistakes import setting_of

    name = option.removeprefix("--").replace("-", "_")
    if name in ("model", "model_path", "model_name_or_path"):
        instead = f"`volley train {quoted(value or 'MODEL')}`" if takes == "rest" else f"model.path={value or 'MODEL'}"
        return f"the model has no option: write {instead}"
    found = setting_of(name, value, all_commands()[called].section)
    return f"settings have no dashes: {found}" if found and found.startswith("write ") else found


def _setting(argument: str) -> str:
    """Return `--key.path=value`, also with one dash, as `key.path=value`, and any other argument as it is."""
    return argument.lstrip("-") if re.match(r"--?\w+(\.\w+)+=", argument) else argument


def parser(called: str | None = None) -> argparse.ArgumentParser:
    """Parser of the whole command line, with the arguments of the command `called`, or of all."""
    whole = _Parser(prog="volley", description="Reinforcement-learning post-training for language-model agents.")
    whole.add_argument("--version", action="version", version=f"volley {version(wheel.DISTRIBUTION)}")
    parts = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in all_commands().items():
        part = parts.add_parser(name, help=command.help, epilog=f"example: {_example(command)}")
        if called is None or called == name:
            module = import_module(command.module)
            module.add(part)
            _add_json(part)
            part.set_defaults(command=module.run, called=name, outlives_output=command.outlives_output)
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
