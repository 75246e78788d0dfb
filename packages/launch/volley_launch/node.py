"""`volley node`: run the services of one host of a run that takes several hosts.

FOLDER is the one that `volley launch` writes: the configuration `run.yaml`, and secrets. The first host shows the run
as `volley train` does, and ends with it; the others end when it has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shared import config
from shared.clients.base import HttpClient
from shared.config import LoadedConfig
from shared.errors import ConfigError, ServiceUnreachable, VolleyError, first_error
from shared.files import storage
from shared.run.folder import RunFolder
from shared.web.access import Role, token_for
from volley.commands import train
from volley.local import stack
from volley.local.processes import Reaper
from volley.local.signals import Stopped, stopping_on_signal
from volley.local.supervisor import RestartPolicy
from volley.printing import print_lines
from volley_launch.folder import LaunchFolder
from volley_launch.hosts import FIRST_PORT, Hosts
from volley_launch.scratch import scratch_folder

SILENCE_S = 600.0
"""Time without an answer of the first host after which another host gives up, in seconds."""
_POLL_S = 1.0
_SHARED_S = 90.0
"""Time until a file of the first host shows on a shared file system: clients of NFS cache folders for a minute."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that `volley launch` has written")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="values that override run.yaml, the same on every host"
    )
    parser.add_argument(
        "--hosts",
        required=True,
        help="names or addresses of all hosts, with commas or blanks between them; the trainer's come first",
    )
    parser.add_argument("--index", type=int, required=True, help="position of this host among them, from 0")
    parser.add_argument(
        "--first-port", type=int, default=FIRST_PORT, help=f"ports from here on are used (default {FIRST_PORT})"
    )
    parser.add_argument(
        "--scratch", type=Path, help="where a rollout server keeps weights while it runs (default: $TMPDIR, or /tmp)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    addresses = re.findall(r"[^\s,]+", arguments.hosts)
    place = (addresses, arguments.index, arguments.first_port)
    return main(arguments.folder, arguments.overrides, *place, arguments.scratch)


def main(
    path: Path,
    overrides: Sequence[str],
    addresses: Sequence[str],
    index: int,
    first_port: int = FIRST_PORT,
    scratch: Path | None = None,
    seams: stack.StackSeams = stack.REAL,
    silence_s: float = SILENCE_S,
) -> int:
    """Run host `index` of `addresses` until the run has ended. Returns the exit code.

    Raises ConfigError for too few hosts, ServiceUnreachable if the first host is silent, and as `volley train`.
    """
    launch = LaunchFolder(path.absolute())
    files = [launch.config]
    hosts = Hosts.of(config.load(files, overrides).config, tuple(addresses), first_port, launch.secrets)
    place, layer = hosts.place(index), hosts.layer(index)
    seams = replace(seams, place=place)
    if index == 0:
        return train.start_or_continue(_loaded(files, overrides, layer), seams)
    with scratch_folder("volley-", scratch) as kept:
        if "rollout" in place.counts:
            layer["run"] = {"dir": str(kept)}
        loaded = _loaded(files, overrides, layer)
        try:
            _join(loaded, launch.host(index, place.address), place.address, seams, silence_s)
        except Stopped as stopped:
            print_lines(f"{place.address}: stopped by {stopped}")
            return stopped.exit_code
    return 0


def _loaded(files: Sequence[Path], overrides: Sequence[str], layer: dict[str, object]) -> LoadedConfig:
    return config.rooted(config.load(files, overrides, given=layer), Path.cwd())


def _join(loaded: LoadedConfig, folder: RunFolder, address: str, seams: stack.StackSeams, silence_s: float) -> None:
    """Run the host's services. Raises Stopped, or VolleyError; every process it started has ended by then."""
    with storage.storage(folder.path):
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.secrets.mkdir(mode=0o700, exist_ok=True)
    storage.replace(folder.config, loaded.to_yaml().encode())
    try:
        asyncio.run(_joined(loaded, folder, address, seams, silence_s))
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _joined(
    loaded: LoadedConfig, folder: RunFolder, address: str, seams: stack.StackSeams, silence_s: float
) -> None:
    def say(line: str) -> None:
        print_lines(f"{address}: {line}")

    services = loaded.config.services
    token, ca_file = token_for(services.token_files, Role.VIEWER), services.tls.ca_file
    with Reaper.running() as reaper:
        async with (
            stopping_on_signal(lambda name: say(f"{name}: stopping all services"), reaper.kill_all),
            HttpClient(services.base_url("trainer"), timeout_s=5.0, ca_file=ca_file) as trainer,
            HttpClient(services.base_url("orchestrator"), token=token, timeout_s=5.0, ca_file=ca_file) as orchestrator,
        ):
            say(f"waiting for {trainer.base_url}")
            await _until_answered(trainer, silence_s)
            if "trainer" in (seams.place.counts if seams.place else {}):
                await _until_shared(RunFolder(loaded.config.run.folder), address)
            say(f"starting services (logs in {folder.logs})")
            async with stack.running(loaded, folder, reaper, say, RestartPolicy(), seams):
                await _until_ended(orchestrator, loaded.config.run.name, silence_s)
            say("the run has ended")


async def _until_answered(client: HttpClient, silence_s: float) -> None:
    """Raises ServiceUnreachable if the first host does not answer in time."""
    deadline = time.monotonic() + silence_s
    while True:
        try:
            await client.get("/health", attempts=1)
        except VolleyError as error:
            if time.monotonic() > deadline:
                raise _silent(client, silence_s) from error
        else:
            return
        await asyncio.sleep(_POLL_S)


async def _until_shared(run: RunFolder, address: str) -> None:
    """Wait for the record that the first host has written. Raises ConfigError if it does not show here."""
    deadline = time.monotonic() + _SHARED_S
    while not run.record.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{address} does not see the run's folder {run.path} of the first host",
                "set run.dir to a folder on a file system that all hosts of the trainer mount",
            )
        await asyncio.sleep(_POLL_S)


async def _until_ended(client: HttpClient, name: str, silence_s: float) -> None:
    """Raises ServiceUnreachable if the first host is silent for too long."""
    deadline = time.monotonic() + silence_s
    while True:
        try:
            if (await client.get(f"/runs/{name}", attempts=1)).get("state") == "finished":
                return
            deadline = time.monotonic() + silence_s
        except VolleyError as error:
            if time.monotonic() > deadline:
                raise _silent(client, silence_s) from error
        await asyncio.sleep(_POLL_S)


def _silent(client: HttpClient, silence_s: float) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"the first host has not answered at {client.base_url} for {silence_s:g} s",
        "look whether it is up, and whether its ports can be reached from here",
    )
