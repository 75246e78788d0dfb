"""`volley env`: write, test, submit and manage your own environments.

`init` writes a template; `test` validates a file in this machine's sandbox, as the service would. Neither needs a
service. The others call the environment service of a run (default: the newest in runs/).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.clients.env import EnvClient
from shared.errors import ConfigError, ServiceUnreachable
from shared.run.folder import RunFolder
from shared.visible import quoted, visible
from shared.web.access import Role, read_token, token_for
from volley.printing import join_lines, print_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_trust
from volley.runs import addresses
from volley.runs.run_file import is_held
from volley_python.submissions.source import EnvSource, read_content, settings_of
from volley_python.submissions.waiting import decided
from volley_sandbox.commands.trial import validated
from volley_sandbox.submissions import templates

_WAIT_S = 600.0
_FILE_HELP = "a Python file, a .zip, a .whl, a folder (also of Harbor tasks), or - for standard input"
type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


@dataclass(frozen=True, slots=True)
class EnvTarget:
    """Environment service to call: a run's, or the one at `url`."""

    run_dir: Path | None = None
    url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None

    def client(self) -> EnvClient:
        """Raises ConfigError."""
        if self.url is not None:
            token = read_token(self.token_file, "--token-file") if self.token_file else None
            return EnvClient(self.url, token=token, ca_file=self.ca_file)
        found = addresses.read(_folder_of(self.run_dir))
        return EnvClient(found.url("env"), token=token_for(found.token_files, Role.ADMIN), ca_file=found.ca_file)


def add(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(required=True, metavar="COMMAND")
    init = _part(parts, "init", "write an environment template", "maze.py")
    init.add_argument("file", type=Path, metavar="FILE.py")
    init.add_argument("--template", choices=templates.files(), default="sums", help="template to copy (default: sums)")
    init.set_defaults(part=_run_init)
    test = _part(parts, "test", "validate a file or folder on this machine, as the service would", "maze.py")
    test.add_argument("file", type=Path, metavar="FILE", help=_FILE_HELP)
    test.add_argument("--entry", metavar="CLASS", help="the environment's class, if the file has several")
    test.add_argument("--config", type=Path, metavar="FILE.yaml", help="arguments of the class")
    test.add_argument(
        "overrides", nargs="*", metavar="services.env.KEY=VALUE", help="settings of the run's environment service"
    )
    test.set_defaults(part=_run_test)
    _add_submit(parts)
    _add_target(listed := _part(parts, "list", "list all environments and their states", "--run runs/quickstart"))
    listed.set_defaults(part=_run_list)
    for name, text in (
        ("show", "show a submitted environment's versions, history and validation report"),
        ("logs", "show the latest output and failures of its episodes"),
        ("activate", "put a version in use: promote a canary, or return to a retired version"),
        ("retire", "retire an environment: no new groups of it"),
    ):
        part = _part(parts, name, text, "maze")
        part.add_argument("name", metavar="NAME|NAME@VERSION")
        _add_target(part)
        part.set_defaults(part=_run_about, about=name)


def _part(parts: _Commands, name: str, text: str, example: str) -> argparse.ArgumentParser:
    return parts.add_parser(name, help=text, epilog=f"example: volley env {name} {example}")


def _add_submit(parts: _Commands) -> None:
    about = "submit an environment to a run's service, which validates it first"
    submit = _part(parts, "submit", about, "maze.py --weight 1")
    source = submit.add_mutually_exclusive_group(required=True)
    source.add_argument("file", type=Path, nargs="?", metavar="FILE", help=_FILE_HELP)
    source.add_argument(
        "--import-path", metavar="PACKAGE.MODULE:CLASS", help="class of a package that the service has installed"
    )
    source.add_argument("--remote", metavar="URL", help="an environment on another server; needs --protocol")
    submit.add_argument("--protocol", help="protocol of --remote: openenv, nemo_gym, volley")
    submit.add_argument(
        "--tasks",
        type=_split_file,
        action="append",
        default=[],
        metavar="SPLIT=FILE.jsonl",
        help="rows for --protocol nemo_gym",
    )
    submit.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="arguments of the class, or settings of the protocol"
    )
    submit.add_argument("--name", metavar="NAME", help="default: the file's name")
    submit.add_argument("--entry", metavar="CLASS", help="the environment's class, if the file has several")
    submit.add_argument(
        "--weight",
        type=_weight,
        default=0.0,
        metavar="W",
        help="weight in live runs, relative to weight 1 of their own environment (default: 0, joins none)",
    )
    submit.add_argument("--replace", action="store_true", help="submit a new version of an existing name")
    submit.add_argument("--no-wait", action="store_true", help="do not wait for validation")
    _add_target(submit)
    submit.set_defaults(part=_run_submit)


def _add_target(part: argparse.ArgumentParser) -> None:
    part.add_argument("--run", type=Path, metavar="RUN_DIR", help="call this run's service (default: newest in runs/)")
    add_trust(part)
    part.add_argument("--url", help="address of the service, instead of --run")
    part.add_argument("--token-file", type=Path, metavar="FILE", help="admin token, with --url")
    part.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificate of the service, with --url")


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


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError, and the service's errors."""
    part: Callable[[argparse.Namespace], int] = arguments.part
    try:
        return part(arguments)
    except ServiceUnreachable:
        if arguments.url is not None:
            raise
        folder = _folder_of(arguments.run)
        if not is_held(folder) and "env" not in addresses.read(folder).external:
            raise ServiceUnreachable(
                f"run {folder.name} has ended, and its environment service with it",
                f"its logs are in {folder.logs}; `volley up {quoted(folder.path)}` continues it",
            ) from None
        raise


def _folder_of(run_dir: Path | None) -> RunFolder:
    return RunFolder(run_dir.absolute()) if run_dir else addresses.newest_run()


def _run_init(arguments: argparse.Namespace) -> int:
    return init(arguments.file, arguments.template)


def _run_test(arguments: argparse.Namespace) -> int:
    return test(arguments.file, arguments.entry, arguments.config, arguments.overrides)


def _run_submit(arguments: argparse.Namespace) -> int:
    if (arguments.remote is None) != (arguments.protocol is None):
        raise ConfigError("--remote and --protocol belong together", "add the other, for example --protocol openenv")
    if arguments.tasks and arguments.remote is None:
        raise ConfigError("--tasks goes with --remote", "leave it out: a submitted file makes its own tasks")
    if arguments.entry is not None and arguments.file is None:
        raise ConfigError("--entry goes with a file", "leave it out, or name the class after the import path's colon")
    source = EnvSource(
        arguments.file,
        arguments.import_path,
        arguments.remote,
        arguments.protocol,
        dict(arguments.tasks),
        arguments.config,
        arguments.entry,
    )
    return submit(
        _target_of(arguments),
        source,
        arguments.name,
        weight=arguments.weight,
        replace=arguments.replace,
        wait=not arguments.no_wait,
    )


def _run_list(arguments: argparse.Namespace) -> int:
    return listed(_target_of(arguments))


def _run_about(arguments: argparse.Namespace) -> int:
    return ABOUT[arguments.about](_target_of(arguments), arguments.name)


def _target_of(arguments: argparse.Namespace) -> EnvTarget:
    return EnvTarget(arguments.run, arguments.url, arguments.token_file, arguments.ca_file)


def init(file: Path, template: str) -> int:
    """Write a template. Raises ConfigError if the file exists."""
    text = templates.files()[template].read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already", "choose another name") from None
    except FileNotFoundError:
        raise ConfigError(f"folder {file.parent} does not exist", "make it, or choose another one") from None
    steps = [
        f"try it:    volley env test {quoted(file)}",
        f"train it:  volley train MODEL --env {quoted(file)}",
        f"submit it: volley env submit {quoted(file)} --weight 1  # to a run that is running",
    ]
    print_result({"file": file, "template": template}, join_lines([f"wrote {file}", *steps]))
    return 0


def test(file: Path, entry: str | None, config: Path | None, settings: Sequence[str]) -> int:
    """Validate a file or folder in this machine's sandbox. Exit code 0 if the service would accept it.

    Args:
        settings: settings of the environment service, as KEY=VALUE. Raises ConfigError for another key.
    """
    if others := [setting for setting in settings if not setting.startswith("services.env.")]:
        raise ConfigError(f"{others[0]} is no setting of the environment service", "write services.env.KEY=VALUE")
    content = read_content(file)
    with working(f"testing {file}"):
        code, report = validated(
            content, entry, settings_of(config), settings, seen=lambda check: print_lines(*_check_lines(check))
        )
    if report is not None:
        print_result(report, join_lines(_notes(report)))
    return code


def submit(target: EnvTarget, source: EnvSource, name: str | None, *, weight: float, replace: bool, wait: bool) -> int:
    """Submit an environment. Exit code 1 if it is rejected. Raises ConfigError (a file), and the service's errors."""
    return asyncio.run(_submit(target, source.body(name, weight), replace, wait))


async def _submit(target: EnvTarget, body: Mapping[str, Any], replace: bool, wait: bool) -> int:
    async with target.client() as client:
        row = await client.submit(body, replace=replace)
        print_lines(f"{row['name']} is {row['state']}")
        if not wait:
            print_result(row)
            return 0
        row = await decided(client, row["name"], row["state"], _WAIT_S, print_lines)
        lines = _report_lines(row.get("report"))
        if row["state"] == "canary":
            lines.append(f"live runs play it now and then; `volley env show {quoted(body['name'])}` shows its results")
        print_result(row, join_lines(lines))
        return 1 if row["state"] == "rejected" else 0


def listed(target: EnvTarget) -> int:
    found = asyncio.run(_asked(target, lambda client: client.environments()))
    print_result(found, lambda: _table(found["environments"]))
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{'name':<{width}}  {'base':<12}  {'state':<10}  {'weight':>6}  why"]
    for row in rows:
        text = (
            f"{row['name']:<{width}}  {row['base']:<12}  {row['state']:<10}  {row['weight']:>6g}  {row.get('why', '')}"
        )
        lines.append(text.rstrip())
        lines += [f"  {row['name']}: {row['trouble']}"] if row.get("trouble") else []
    return join_lines(lines)


def show(target: EnvTarget, name: str) -> int:
    """Print every version with its history, and the newest version's report."""
    versions: list[Mapping[str, Any]] = asyncio.run(_asked(target, lambda client: client.versions(name)))
    lines = [line for row in versions for line in _version_lines(row)]
    print_result({"versions": versions}, join_lines([*lines, *_report_lines(versions[-1].get("report"))]))
    return 0


def _version_lines(row: Mapping[str, Any]) -> Iterator[str]:
    splits = ", ".join(f"{split}: {n}" for split, n in row["splits"].items())
    text = f"{row['name']}: {row['state']}, weight {row['weight']:g}, {row['size']} bytes"
    yield f"{text}; {splits}" if splits else text
    for line in row["history"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["at"]))
        yield f"  {at}  {line['state']:<10}  {line['why']}".rstrip()
    for count in row.get("failures", ()):
        yield f"  turn {count['turn']}: {count['failed']} of {count['reached']} live episodes failed"
    if row.get("trouble"):
        yield f"  trouble: {row['trouble']}"


def logs(target: EnvTarget, name: str) -> int:
    log = asyncio.run(_asked(target, lambda client: client.log(name)))
    print_result({"log": log}, log)
    return 0


def retire(target: EnvTarget, name: str) -> int:
    return _moved(asyncio.run(_asked(target, lambda client: client.retire(name))))


def activate(target: EnvTarget, name: str) -> int:
    return _moved(asyncio.run(_asked(target, lambda client: client.activate(name))))


ABOUT: Mapping[str, Callable[[EnvTarget, str], int]] = {
    "show": show,
    "logs": logs,
    "activate": activate,
    "retire": retire,
}
"""Commands about one environment, by name."""


def _moved(row: Mapping[str, Any]) -> int:
    print_result(row, visible(f"{row['name']} is {row['state']}"))
    return 0


async def _asked[T](target: EnvTarget, ask: Callable[[EnvClient], Awaitable[T]]) -> T:
    async with target.client() as client:
        return await ask(client)


def _report_lines(report: Mapping[str, Any] | None) -> list[str]:
    if not report:
        return []
    return [*(line for check in report["checks"] for line in _check_lines(check)), *_notes(report)]


def _check_lines(check: Mapping[str, Any]) -> list[str]:
    """The check's first line and its hint; then the other lines, such as the end of a program's output."""
    first, *others = check["detail"].splitlines() or [""]
    hint = [check["hint"]] if check["hint"] and not check["ok"] else []
    return [
        f"  {'ok  ' if check['ok'] else 'FAIL'}  {check['name']}: {first}",
        *(f"        {line}" for line in [*hint, *others]),
    ]


def _notes(report: Mapping[str, Any]) -> list[str]:
    """Warnings, and what the environment printed besides the errors that a failed check shows."""
    shown = " ".join(check["detail"] for check in report["checks"] if not check["ok"])
    log = [line for line in report["log"].splitlines() if line.partition(": ")[2] not in shown and line not in shown]
    lines = [f"  note  {warning}" for warning in report["warnings"]]
    return [*lines, "  it printed:", *(f"    {line}" for line in log[-20:])] if log else lines
