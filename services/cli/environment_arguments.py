"""The arguments of `volley env`, whose commands are in `commands.environments`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.layout import TEMPLATES
from services.cli.run_arguments import add_trust
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.cli.commands import environments

_FILE_HELP = "a Python file, a .zip, a .whl, a folder (also of Harbor's tasks), or - for standard input"
type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: _Commands) -> None:
    whole = commands.add_parser("env", help="write, try, submit and look after environments of your own")
    parts = whole.add_subparsers(required=True, metavar="COMMAND")
    init = parts.add_parser("init", help="write a template of an environment")
    init.add_argument("file", type=Path, metavar="FILE.py")
    init.add_argument("--template", choices=TEMPLATES, default="sums", help="what to begin with (default: sums)")
    init.set_defaults(command=_init)
    test = parts.add_parser("test", help="validate a file or folder on this machine, as the service would")
    test.add_argument("file", type=Path, metavar="FILE", help=_FILE_HELP)
    test.add_argument("--entry", metavar="CLASS", help="the environment's class, where there are several")
    test.add_argument("--config", type=Path, metavar="FILE.yaml", help="arguments of the class")
    test.set_defaults(command=_test)
    _add_submit(parts)
    _add_target(listed := parts.add_parser("list", help="list all environments and their states"))
    listed.set_defaults(command=_list)
    for name, told in (
        ("show", "show a submitted environment's versions, history and validation report"),
        ("logs", "show what its episodes printed last, and how they failed"),
        ("activate", "put a version in use: promote a canary, or go back to a retired version"),
        ("retire", "take an environment back: no new groups of it"),
    ):
        part = parts.add_parser(name, help=told)
        part.add_argument("name", metavar="NAME|NAME@VERSION")
        _add_target(part)
        part.set_defaults(command=_about, about=name)


def _add_submit(parts: _Commands) -> None:
    submit = parts.add_parser("submit", help="submit one to a run's environment service; it is validated first")
    source = submit.add_mutually_exclusive_group(required=True)
    source.add_argument("file", type=Path, nargs="?", metavar="FILE", help=_FILE_HELP)
    source.add_argument(
        "--import-path", metavar="PACKAGE.MODULE:CLASS", help="of a package that is installed beside the service"
    )
    source.add_argument("--remote", metavar="URL", help="an environment on somebody else's server, with --protocol")
    submit.add_argument("--protocol", help="what --remote speaks: openenv, nemo_gym, volley")
    submit.add_argument(
        "--tasks",
        type=_split_file,
        action="append",
        default=[],
        metavar="SPLIT=FILE.jsonl",
        help="the rows of --protocol nemo_gym",
    )
    submit.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="arguments of the class, or settings of the protocol"
    )
    submit.add_argument("--name", metavar="NAME", help="default: the file's name")
    submit.add_argument("--entry", metavar="CLASS", help="the environment's class, where there are several")
    submit.add_argument(
        "--weight",
        type=_weight,
        default=0.0,
        metavar="W",
        help="share of live runs, beside their own environment of weight 1 (default: 0, joins none)",
    )
    submit.add_argument("--replace", action="store_true", help="a new version of a name that is there")
    submit.add_argument("--no-wait", action="store_true", help="do not wait for the validation")
    _add_target(submit)
    submit.set_defaults(command=_submit)


def _add_target(part: argparse.ArgumentParser) -> None:
    part.add_argument("--run", type=Path, metavar="RUN_DIR", help="whose service (default: the newest of runs/)")
    add_trust(part)
    part.add_argument("--url", help="of the service, instead of a run")
    part.add_argument("--token-file", type=Path, metavar="FILE", help="an admin's token, with --url")
    part.add_argument("--ca-file", type=Path, metavar="FILE", help="who vouches for the service, with --url")


def _split_file(text: str) -> tuple[str, Path]:
    """Raises ArgumentTypeError."""
    split, equals, path = text.partition("=")
    if not (split and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not SPLIT=FILE, for example train=train.jsonl")
    return split, Path(path)


def _weight(text: str) -> float:
    """Raises ArgumentTypeError."""
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1000")
    return weight


def _init(arguments: argparse.Namespace) -> int:
    from services.cli.commands import environments

    return environments.init(arguments.file, arguments.template)


def _test(arguments: argparse.Namespace) -> int:
    from services.cli.commands import environments

    return environments.test(arguments.file, arguments.entry, arguments.config)


def _submit(arguments: argparse.Namespace) -> int:
    from services.cli.commands import environments
    from services.cli.commands.environment_source import EnvSource

    if (arguments.remote is None) != (arguments.protocol is None):
        raise ConfigError("--remote and --protocol belong together", "for example --protocol openenv")
    if arguments.tasks and arguments.remote is None:
        raise ConfigError("--tasks goes with --remote", "a file of one's own makes its tasks itself")
    if arguments.entry is not None and arguments.file is None:
        raise ConfigError("--entry goes with a file", "an import path names its class after the colon")
    source = EnvSource(
        arguments.file,
        arguments.import_path,
        arguments.remote,
        arguments.protocol,
        dict(arguments.tasks),
        arguments.config,
        arguments.entry,
    )
    return environments.submit(
        _target(arguments),
        source,
        arguments.name,
        weight=arguments.weight,
        replace=arguments.replace,
        wait=not arguments.no_wait,
    )


def _list(arguments: argparse.Namespace) -> int:
    from services.cli.commands import environments

    return environments.listed(_target(arguments))


def _about(arguments: argparse.Namespace) -> int:
    from services.cli.commands import environments

    return environments.ABOUT[arguments.about](_target(arguments), arguments.name)


def _target(arguments: argparse.Namespace) -> environments.EnvTarget:
    from services.cli.commands import environments

    return environments.EnvTarget(arguments.run, arguments.url, arguments.token_file, arguments.ca_file)
