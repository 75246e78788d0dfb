"""`volley env`: write, try, submit and look after environments of one's own.

`init` and `test` need no service: the first writes a template, the second validates a file in the sandbox of this
machine, as the service would. The others talk to the environment service of a run (default: the newest of runs/).
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.cli.commands.environment_source import EnvSource, read_content, settings_of
from services.cli.layout import CACHE, PROJECT, TEMPLATES, python_of, variables_of
from services.cli.printing import printed, printed_block
from services.cli.runs import addresses
from shared.clients.env import EnvClient
from shared.errors import ConfigError, Unavailable
from shared.run.folder import RunFolder
from shared.web.access import Role, read_token, token_for

_POLL_S = 0.3
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class EnvTarget:
    """Which service: that of a run, or one by its address."""

    run_dir: Path | None = None
    url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None

    def client(self) -> EnvClient:
        """Raises ConfigError."""
        if self.url is not None:
            token = read_token(self.token_file, "--token-file") if self.token_file else None
            return EnvClient(self.url, token=token, ca_file=self.ca_file)
        folder = RunFolder(self.run_dir.absolute()) if self.run_dir else addresses.newest_run()
        found = addresses.read(folder)
        return EnvClient(found.urls["env"], token=token_for(found.token_files, Role.ADMIN), ca_file=found.ca_file)


def init(file: Path, template: str) -> int:
    """Raises ConfigError where the file is there already."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(TEMPLATES[template].read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{file} is there already", "choose another name") from None
    if template == "verifiers":
        printed(
            f"wrote {file}", f"start it:  uv run --with YOUR-PACKAGE {file} YOUR_MODULE; how to submit it stands in it"
        )
    else:
        printed(
            f"wrote {file}", f"try it:    volley env test {file}", f"submit it: volley env submit {file} --weight 1"
        )
    return 0


def test(file: Path, entry: str | None, config: Path | None) -> int:
    """Validates a file or folder in the sandbox of this machine; the exit code is 0 if it would be taken."""
    content = read_content(file)
    asked = {"name": content.name or "environment", "archive": content.archive, "entry": entry}
    asked |= {"config": dict(settings_of(config))}
    command = [str(python_of("base")), "-m", "services.env.submissions.check", str(CACHE), orjson.dumps(asked).decode()]
    ended = subprocess.run(
        command,
        cwd=PROJECT,
        env=variables_of("base", cpu=True),
        input=content.data,
        stdout=subprocess.PIPE,
        check=False,
    )
    if ended.stdout:
        _print_report(orjson.loads(ended.stdout))
    return ended.returncode


def submit(target: EnvTarget, source: EnvSource, name: str | None, *, weight: float, replace: bool, wait: bool) -> int:
    """Raises ConfigError (a file), and what the service says. The exit code is 1 if it is rejected."""
    return asyncio.run(_submit(target, source.body(name, weight), replace, wait))


async def _submit(target: EnvTarget, body: Mapping[str, Any], replace: bool, wait: bool) -> int:
    async with target.client() as client:
        row = await client.submit(body, replace=replace)
        printed(f"{row['name']} is {row['state']}")
        if not wait:
            return 0
        row = await _decided(client, row["name"], row["state"])
        _print_report(row.get("report"))
        if row["state"] == "rejected":
            return 1
        if row["state"] == "canary":
            printed(f"live runs play it now and then; `volley env show {body['name']}` tells how it fares")
        return 0


async def _decided(client: EnvClient, name: str, told: str) -> Mapping[str, Any]:
    """The version once its validation is over; its states are printed as they change. Raises Unavailable."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        row = (await client.versions(name))[0]
        if row["state"] != told:
            told = row["state"]
            printed(f"{name} is {told}: {row['why']}" if row["why"] else f"{name} is {told}")
        if told not in ("submitted", "validating"):
            return row
        await asyncio.sleep(_POLL_S)
    raise Unavailable(f"{name} is still {told} after {_WAIT_S:g} s", f"`volley env show {name}` tells more")


def listed(target: EnvTarget) -> int:
    rows: Sequence[Mapping[str, Any]] = asyncio.run(_asked(target, lambda client: client.environments()))[
        "environments"
    ]
    width = max(len(row["name"]) for row in rows)
    printed(f"{'name':<{width}}  {'base':<12}  {'state':<10}  {'weight':>6}  why")
    for row in rows:
        told = (
            f"{row['name']:<{width}}  {row['base']:<12}  {row['state']:<10}  {row['weight']:>6g}  {row.get('why', '')}"
        )
        printed(told.rstrip())
        if row.get("trouble"):
            printed(f"  {row['name']}: {row['trouble']}")
    return 0


def show(target: EnvTarget, name: str) -> int:
    """Prints every version with its history, and the newest one's report."""
    versions: list[Mapping[str, Any]] = asyncio.run(_asked(target, lambda client: client.versions(name)))
    for row in versions:
        splits = ", ".join(f"{split}: {n}" for split, n in row["splits"].items())
        told = f"{row['name']}: {row['state']}, weight {row['weight']:g}, {row['size']} bytes"
        printed(f"{told}; {splits}" if splits else told)
        for line in row["history"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["at"]))
            printed(f"  {at}  {line['state']:<10}  {line['why']}".rstrip())
        for count in row.get("failures", ()):
            printed(f"  turn {count['turn']}: {count['failed']} of {count['reached']} live episodes failed")
        if row.get("trouble"):
            printed(f"  trouble: {row['trouble']}")
    _print_report(versions[-1].get("report"))
    return 0


def logs(target: EnvTarget, name: str) -> int:
    printed_block(asyncio.run(_asked(target, lambda client: client.log(name))))
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
    printed(f"{row['name']} is {row['state']}")
    return 0


async def _asked[T](target: EnvTarget, ask: Callable[[EnvClient], Awaitable[T]]) -> T:
    async with target.client() as client:
        return await ask(client)


def _print_report(report: Mapping[str, Any] | None) -> None:
    for check in report["checks"] if report else ():
        hint = f" ({check['hint']})" if check["hint"] and not check["ok"] else ""
        printed(f"  {'ok  ' if check['ok'] else 'FAIL'}  {check['name']}: {check['detail']}{hint}")
    for warning in report["warnings"] if report else ():
        printed(f"  note  {warning}")
    if report and report["log"]:
        printed("  it printed:", *(f"    {line}" for line in report["log"].splitlines()[-20:]))
