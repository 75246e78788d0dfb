"""The `volley` command. Heavy imports happen in the command that needs them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from services.cli import environment_arguments, model_arguments, sft_arguments
from services.cli.program import run_program
from services.cli.run_arguments import accept, add_run_dir, add_trust
from shared.config import add_arguments
from shared.errors import ConfigError

QUICKSTART = "configs/quickstart.yaml"
type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `volley`."""
    run_program(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = parsed(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    accept(arguments)
    return command(arguments)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse takes no further positional arguments after an option that follows the first ones."""
    whole = parser()
    arguments, late = whole.parse_known_args(argv)
    if late and not (hasattr(arguments, "overrides") and all("=" in one and one[0] != "-" for one in late)):
        whole.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        arguments.overrides = [*arguments.overrides, *late]
    return arguments


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="volley", description="Reinforcement-learning post-training for language-model agents."
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_running,
        sft_arguments.add,
        environment_arguments.add,
        model_arguments.add,
        _add_looking,
        _add_proving,
        _add_measuring,
    ):
        add(commands)
    return whole


def _add_running(commands: _Commands) -> None:
    train = commands.add_parser(
        "train",
        aliases=["up"],
        help="train, or go on training: starts all services on this machine, stops them at the end",
    )
    train.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="of a run to start or continue; given again, the later file wins",
    )
    train.add_argument(
        "rest",
        nargs="*",
        metavar="RUN_DIR | key.path=value",
        help="a run's folder continues that run; values win over the files",
    )
    train.set_defaults(command=_train)

    quickstart = commands.add_parser("quickstart", help=f"train with {QUICKSTART}")
    quickstart.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that win over the file")
    quickstart.set_defaults(command=_quickstart)

    follow = commands.add_parser("follow", help="watch a run whose services others started, and report at its end")
    add_arguments(follow)
    follow.set_defaults(command=_follow)


def _add_looking(commands: _Commands) -> None:
    report = commands.add_parser("report", help="make summary.json, the plot and the table of a run")
    add_run_dir(report)
    report.set_defaults(command=_report)

    compare = commands.add_parser(
        "compare", help="show runs beside each other, in a table and one picture; with --vary, train them first"
    )
    compare.add_argument("--config", action="append", metavar="FILE.yaml", help="of the runs that --vary trains")
    compare.add_argument(
        "--vary",
        action="append",
        nargs="+",
        default=[],
        metavar=("KEY", "VALUE"),
        help="train a run for each value of a setting, one after the other, e.g. --vary algorithm.name grpo ppo;"
        " given again: for each combination",
    )
    compare.add_argument("--plot", type=Path, metavar="FILE.png", help="where the picture goes")
    add_trust(compare)
    compare.add_argument("--json", action="store_true", help="for programs")
    compare.add_argument("rest", nargs="*", metavar="RUN_DIR | key.path=value", help="runs, or values for --vary")
    compare.set_defaults(command=_compare)

    status = commands.add_parser(
        "status", help="show the services of a run: readiness, weight versions, who waits for whom"
    )
    status.add_argument(
        "targets", nargs="*", metavar="RUN_DIR|URL", help="a run's folder or addresses (default: the newest of runs/)"
    )
    add_trust(status)
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a viewer's token, for services given by address"
    )
    status.add_argument("--ca-file", type=Path, metavar="FILE", help="who vouches for services given by address")
    status.set_defaults(command=_status)

    access = commands.add_parser(
        "access", help="print addresses and token files of a running run, for a shell to evaluate"
    )
    add_run_dir(access)
    access.add_argument("--json", action="store_true", help="for programs")
    access.set_defaults(command=_access)


def _add_proving(commands: _Commands) -> None:
    verify = commands.add_parser(
        "verify", help="prove that no ticket of a run was lost or trained twice, from its folder"
    )
    add_run_dir(verify)
    verify.add_argument("--json", action="store_true", help="for programs")
    verify.set_defaults(command=_verify)

    replay = commands.add_parser(
        "replay", help="train archived groups again from a retained checkpoint, and compare bit for bit"
    )
    add_run_dir(replay)
    replay.add_argument("--from-step", type=int, metavar="K", help="step of the checkpoint to begin at")
    replay.add_argument(
        "--refused",
        metavar="VERSION",
        help="instead: a step that was refused, because it gave numbers that are not finite",
    )
    replay.add_argument("--to-step", type=int, metavar="M", help="last step (default: that of the newest checkpoint)")
    replay.add_argument("--json", action="store_true", help="for programs")
    replay.set_defaults(command=_replay)

    reverify = commands.add_parser(
        "reverify", help="play archived episodes to the environments of today: what their rewards would be now"
    )
    add_run_dir(reverify)
    reverify.add_argument("--env", metavar="NAME", help="only episodes of that environment")
    reverify.add_argument("--by", metavar="NAME", help="the environment that judges them, e.g. its next version NAME@2")
    reverify.add_argument("--json", action="store_true", help="for programs")
    reverify.set_defaults(command=_reverify)


def _add_measuring(commands: _Commands) -> None:
    evaluate = commands.add_parser(
        "eval", help="measure a run's version or a model on the held-out tasks of a configuration, without training"
    )
    evaluate.add_argument("target", metavar="RUN|RUN@VERSION|MODEL", help="RUN: its newest version")
    evaluate.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="on what, and how (default: the run's own); given again, the later file wins",
    )
    add_trust(evaluate)
    evaluate.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that win over the files")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    evaluate.set_defaults(command=_evaluate)


def _train(arguments: argparse.Namespace) -> int:
    from services.cli.commands import train

    if arguments.config:
        return train.main(arguments.config, arguments.rest)
    if not arguments.rest or "=" in Path(arguments.rest[0]).name:
        raise ConfigError(
            "neither a run's folder nor --config is given", "`volley train --config FILE.yaml` or `volley up RUN_DIR`"
        )
    return train.resume(Path(arguments.rest[0]), arguments.rest[1:])


def _quickstart(arguments: argparse.Namespace) -> int:
    from services.cli.commands import train
    from services.cli.layout import PROJECT

    os.chdir(PROJECT)
    return train.main([QUICKSTART], train.fresh_name([QUICKSTART], arguments.overrides), prove=True)


def _follow(arguments: argparse.Namespace) -> int:
    from services.cli.commands import follow

    return follow.main(arguments.config, arguments.overrides)


def _compare(arguments: argparse.Namespace) -> int:
    from services.cli.commands import compare

    if bool(arguments.config) != bool(arguments.vary):
        raise ConfigError("--config and --vary belong together", "to compare runs that exist, give their folders")
    folders = (
        compare.varied(arguments.config, arguments.rest, arguments.vary)
        if arguments.vary
        else [Path(one) for one in arguments.rest]
    )
    return compare.main(folders, arguments.plot, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> int:
    from services.cli.reporting import report

    return report.main(arguments.run_dir)


def _status(arguments: argparse.Namespace) -> int:
    from services.cli.commands import status

    return status.main(
        arguments.targets, as_json=arguments.json, token_file=arguments.token_file, ca_file=arguments.ca_file
    )


def _access(arguments: argparse.Namespace) -> int:
    from services.cli.commands import access

    return access.main(arguments.run_dir, as_json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from services.cli.verify import command

    return command.main(arguments.run_dir, arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    from services.cli.commands import replay

    return replay.main(arguments.run_dir, arguments.from_step, arguments.to_step, arguments.refused, arguments.json)


def _reverify(arguments: argparse.Namespace) -> int:
    from services.cli.reverify import command

    return command.main(arguments.run_dir, only=arguments.env, instead=arguments.by, as_json=arguments.json)


def _evaluate(arguments: argparse.Namespace) -> int:
    from services.cli.commands import evaluate

    return evaluate.main(arguments.target, arguments.config or [], arguments.overrides, arguments.json)


if __name__ == "__main__":
    main()
