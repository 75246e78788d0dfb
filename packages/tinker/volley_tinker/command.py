"""`volley tinker`: train a model for clients of Tinker's interface, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from shared import boot, config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files import locks
from shared.models import hub
from shared.models.weight_files import weight_files
from shared.run.folder import RunFolder
from shared.services import SERVICES
from shared.visible import quoted
from volley.layout import python_of, variables_of
from volley.local.processes import ProcessSpec, Reaper
from volley.local.signals import stopping_on_signal
from volley.local.supervisor import SupervisedProcess, keep_running
from volley.printing import print_lines as say
from volley.printing import print_result
from volley.run_arguments import add_api_key, api_key_of
from volley.runs.record import secret
from volley_launch.accelerators import check_device
from volley_serving.serve import add_server, find_port, is_ready, until_stopped, with_context, without_key
from volley_tinker import futures

_TRAINER, _ROLLOUT = SERVICES["trainer"], SERVICES["rollout"]
_STOP_MARGIN_S = 5.0
_PREFIX = "tml-"
"""Beginning of every API key; the SDK refuses others."""


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """Options of the command line; None is the default."""

    host: str = "127.0.0.1"
    port: int | None = None
    folder: Path | None = None
    name: str | None = None
    dtype: str | None = None
    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    context_length: int | None = None
    api_key: str | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TinkerServer:
    """The configuration of trainer and rollout server, their folder, and the API key."""

    loaded: LoadedConfig
    folder: RunFolder
    name: str
    key: str


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="a Hugging Face folder, or a hub id like Qwen/Qwen3-0.6B")
    add_server(parser, _TRAINER.port)
    parser.add_argument(
        "--folder", type=Path, help="keeps requests, results and checkpoints across restarts (default: runs/tinker)"
    )
    parser.add_argument("--name", help="how clients name the base model (default: the folder's name, or the hub id)")
    key = parser.add_mutually_exclusive_group()
    add_api_key(key, f"it begins with {_PREFIX} (default: the folder's, or a random one)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="further settings, e.g. of trainer")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    given = {name: getattr(arguments, name) for name in TinkerOptions.__slots__}
    return main(arguments.target, TinkerOptions(**given | {"api_key": api_key_of(arguments)}))


def main(target: str, options: TinkerOptions) -> int:
    """Serve until a signal. Returns the exit code. Raises VolleyError if it cannot start or ends early."""
    for info in (_TRAINER, _ROLLOUT):
        python_of(info.environment)
    return until_stopped(_serve(prepare(target, options)))


def prepare(target: str, options: TinkerOptions) -> TinkerServer:
    """Check the device, the model and the addresses, and write the services' files. Raises ConfigError."""
    if options.device != "cpu":
        check_device(options.device, [_ROLLOUT.environment, _TRAINER.environment], "--device")
    folder = RunFolder((options.folder or Path("runs") / "tinker").absolute())
    samplers = folder.path / "samplers"
    for path in (folder.secrets, samplers):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_unused(folder.path)
    key = _key(options, folder)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    files = {"admin": secret(folder, "token_admin"), "service": secret(folder, "token_service", key)}
    tree = {
        "run": {
            "name": folder.path.name,
            "dir": str(folder.path.parent),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "model": {"path": target, "dtype": dtype},
        "data": {"env": "none"},
        "tinker": {"model_name": options.name},
        "trainer": {"length_buckets": [2**30]},  # batches have shapes of their own
        "rollout": {"engine": {"device": options.device}, "weights_root": str(samplers)},
        "services": {
            "trainer": {"host": options.host, "port": find_port(options.host, options.port, _TRAINER.port)},
            "rollout": {"port": find_port("127.0.0.1", 0, 0)},  # any free one: only the trainer calls it
            "token_files": {role: str(path) for role, path in files.items()},
        },
    }
    loaded = config.rooted(config.load([], options.overrides, given=tree), Path.cwd())
    try:
        if hub.keep(loaded.config) is not None:
            raise ConfigError(f"{target} is a version of a run", "export it, and name the folder")
        model = hub.model_folder(loaded.config.model.path, folder.path, weights=True)
        weight_files(model)
    except ConfigError as error:
        raise without_key(error) from error
    loaded = with_context(loaded, model, options.context_length, options.overrides)
    folder.config.write_text(yaml.safe_dump(loaded.tree), encoding="utf-8")
    name = options.name or (model.name if Path(target).is_dir() else target)
    return TinkerServer(loaded, folder, name, key)


def _check_unused(folder: Path) -> None:
    """Raise ConfigError if another server uses the folder, before its configuration is replaced."""
    held = locks.existing_lock_file(folder / futures.LOCK)
    if held is None:
        return
    try:
        if not locks.try_lock(held):
            raise ConfigError(f"{folder} is used by another server", "end it first, or name another --folder")
    finally:
        os.close(held)


def _key(options: TinkerOptions, folder: RunFolder) -> str:
    """Return the API key: the given one, that of the folder, or a new one. Raises ConfigError."""
    if options.api_key is None:
        kept = folder.secrets / "token_service"
        found = kept.read_text(encoding="utf-8").strip() if kept.is_file() else ""
        return found if found.startswith(_PREFIX) else _PREFIX + secrets.token_urlsafe(32)
    key = options.api_key
    if not key.startswith(_PREFIX) or len(key) < 20 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the API key must begin with {_PREFIX} and have 20 or more ASCII characters, without blanks",
            "leave it out for a random one",
        )
    return key


async def _serve(prepared: TinkerServer) -> None:
    """Run both services until a signal. Raises Stopped, VolleyError, or a group of them."""
    services, engine = prepared.loaded.config.services, prepared.loaded.config.rollout.engine
    modules = {"rollout": "volley_serving.standalone", "trainer": "volley_tinker.server"}
    members = [
        SupervisedProcess(
            ProcessSpec(
                name,
                (
                    str(python_of(SERVICES[name].environment)),
                    "-P",
                    "-m",
                    module,
                    "--config",
                    str(prepared.folder.config),
                ),
                variables_of(SERVICES[name].environment, cpu=engine.device == "cpu"),
                prepared.folder.path / f"{name}.log",
                services.limits.grace_s + boot.CLEANUP_S + _STOP_MARGIN_S,
            ),
            lambda name=name: is_ready(services.base_url(name)),
            SERVICES[name].start_s,
        )
        for name, module in modules.items()
    ]
    began = time.monotonic()
    say(f"loading {prepared.name} (logs: {prepared.folder.path}/rollout.log and trainer.log)")
    with Reaper.running() as reaper:
        async with (
            stopping_on_signal(lambda name: say(f"{name}: stopping (once more: without waiting)"), reaper.kill_all),
            keep_running(members, reaper, say),
        ):
            url, after_s = prepared.loaded.config.services.base_url("trainer"), time.monotonic() - began
            described = {"url": url, "model": prepared.name, "api_key": prepared.key, "folder": prepared.folder.path}
            print_result(described, "\n".join(ready_lines(prepared, after_s)))
            await asyncio.Event().wait()


def ready_lines(prepared: TinkerServer, after_s: float) -> list[str]:
    """Lines that say how to reach the server."""
    config, url = prepared.loaded.config, prepared.loaded.config.services.base_url("trainer")
    context = config.rollout.engine.context_length
    return [
        f"ready after {after_s:.0f} s: {prepared.name} ({config.model.dtype}, {context} tokens of context)",
        "",
        f"export TINKER_BASE_URL={quoted(url)}",
        f"export TINKER_API_KEY={quoted(prepared.key)}",
        "",
        f"base model: {prepared.name}    folder: {prepared.folder.path}    all routes: {url}/docs    stop: Ctrl-C",
    ]
