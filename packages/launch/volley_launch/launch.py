"""`volley launch`: write what starts a run on Slurm, with SkyPilot or on TPU VMs. It starts nothing itself."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from volley import wheel
from volley.printing import print_result
from volley_launch import prepared, scripts
from volley_launch.folder import LaunchFolder


def add(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="TARGET", dest="target")
    slurm = commands.add_parser(
        "slurm",
        help="write an sbatch script",
        epilog="example: volley launch slurm --config configs/quickstart.yaml --nodes 3",
    )
    _add_common(slurm)
    slurm.add_argument("--nodes", type=int, help="nodes of the job (default: one more than the trainer's)")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="an option of sbatch, repeatable"
    )
    slurm.add_argument("--volley", type=Path, help="the program `volley` on the nodes (default: this one)")
    sky = commands.add_parser(
        "sky",
        help="write a task of SkyPilot",
        epilog="example: volley launch sky --config configs/quickstart.yaml --resource accelerators=H100:8",
    )
    _add_common(sky)
    sky.add_argument("--nodes", type=int, help="nodes of the cluster (default: one more than the trainer's)")
    sky.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an entry of the task's `resources`, such as accelerators=H100:8 or use_spot=true; repeatable",
    )
    tpu = commands.add_parser(
        "tpu-vm",
        help="write a script of gcloud commands",
        epilog="example: volley launch tpu-vm --config configs/quickstart.yaml --zone us-east5-a --trainer-type v4-16",
    )
    _add_common(tpu)
    tpu.add_argument("--zone", required=True)
    tpu.add_argument("--project", default="", help="project of Google Cloud (default: that of gcloud's configuration)")
    tpu.add_argument("--trainer-type", required=True, metavar="TYPE", help="type of the trainer's slice, such as v4-16")
    tpu.add_argument("--rollout-type", metavar="TYPE", help="type of a rollout server's slice, with a single host")
    tpu.add_argument("--rollout-slices", type=int, default=0, metavar="N", help="slices with a rollout server each")
    tpu.add_argument(
        "--create",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of the command that creates a slice, such as --version=… or --spot; repeatable",
    )


def _add_common(part: argparse.ArgumentParser) -> None:
    config.add_arguments(part)
    part.add_argument("--out", type=Path, help="folder to write (default: launch/NAME of the run)")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    if arguments.target != "slurm" and wheel.is_managed():
        raise ConfigError(
            f"--target {arguments.target} copies a clone to the hosts, and this is an installed wheel",
            "run this in a clone",
        )
    loaded = config.load(arguments.config, arguments.overrides)
    out: Path = arguments.out or Path("launch") / loaded.config.run.name
    launch = LaunchFolder(out.absolute())
    write = {"slurm": _slurm, "sky": _sky, "tpu-vm": _tpu_vm}[arguments.target]
    made, n_hosts, script, command = write(arguments, loaded, launch)
    hosts = prepared.described(made.config, n_hosts)
    value = {
        "run": made.config.run.name,
        "folder": launch.path,
        "script": launch.path / script,
        "command": shlex.join(command),
        "hosts": hosts,
        "notes": list(made.notes),
    }
    print_result(value, lambda: _text(value))
    return 0


def _slurm(
    arguments: argparse.Namespace, loaded: LoadedConfig, launch: LaunchFolder
) -> tuple[LoadedConfig, int, str, list[str]]:
    n = _n_hosts(arguments.nodes, loaded)
    made = prepared.on_shared_disk(prepared.prepared(loaded, launch, n), launch)
    volley = (arguments.volley or Path(sys.executable).parent / "volley").absolute()
    launch.write(made, {"job.sh": scripts.slurm(made, launch, volley, n, arguments.sbatch)})
    return made, n, "job.sh", ["sbatch", str(launch.path / "job.sh")]


def _sky(
    arguments: argparse.Namespace, loaded: LoadedConfig, launch: LaunchFolder
) -> tuple[LoadedConfig, int, str, list[str]]:
    n = _n_hosts(arguments.nodes, loaded)
    made, files = prepared.for_other_disks(prepared.prepared(loaded, launch, n), n)
    launch.write(made, {"task.yaml": scripts.sky(made, launch, files, n, _resources(arguments.resource))})
    return made, n, "task.yaml", ["sky", "launch", str(launch.path / "task.yaml")]


def _tpu_vm(
    arguments: argparse.Namespace, loaded: LoadedConfig, launch: LaunchFolder
) -> tuple[LoadedConfig, int, str, list[str]]:
    n_rollout = arguments.rollout_slices
    if loaded.config.rollout.engine.device != "tpu":
        raise ConfigError(f"rollout.engine.device={loaded.config.rollout.engine.device}", "set it to tpu")
    for name in ("zone", "trainer_type"):
        if not getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is empty", "name one, such as us-central2-b or v4-8")
    if n_rollout < 0:
        raise ConfigError(f"--rollout-slices {n_rollout}", "give 0 or more")
    if n_rollout and not arguments.rollout_type:
        raise ConfigError(f"--rollout-slices {n_rollout} needs their type", "add --rollout-type, such as v4-8")
    if arguments.rollout_type and not n_rollout:
        raise ConfigError(f"--rollout-type {arguments.rollout_type}: of no slices", "add --rollout-slices, such as 1")
    n = loaded.config.services.trainer.num_processes + n_rollout
    made, files = prepared.for_other_disks(prepared.prepared(loaded, launch, n), n)
    name = scripts.slug(loaded.config.run.name)
    slices = [scripts.Slice(f"{name}-trainer", arguments.trainer_type)]
    slices += [scripts.Slice(f"{name}-rollout-{i}", arguments.rollout_type) for i in range(n_rollout)]
    gcloud = {"zone": arguments.zone, "project": arguments.project}
    launch.write(made, {"tpu-vm.sh": scripts.tpu_vm(made, launch, files, slices, gcloud, arguments.create)})
    return made, n, "tpu-vm.sh", [str(launch.path / "tpu-vm.sh"), "create"]


def _n_hosts(given: int | None, loaded: LoadedConfig) -> int:
    """Raises ConfigError."""
    if given is not None and given < 1:
        raise ConfigError(f"--nodes {given}", "give 1 or more")
    n_trainers = loaded.config.services.trainer.num_processes
    return given or (1 if loaded.config.is_supervised else n_trainers + 1)


def _resources(given: Sequence[str]) -> dict[str, Any]:
    """Raises ConfigError."""
    found: dict[str, Any] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not (key and equals):
            raise ConfigError(
                f"--resource {one!r} is not of the form KEY=VALUE", "write --resource accelerators=H100:8"
            )
        found[key] = yaml.safe_load(value) if value.lower() in ("true", "false") or value.isdecimal() else value
    return found


def _text(value: Mapping[str, Any]) -> str:
    n = len(value["hosts"])
    lines = [f"run {value['run']} on {n} {'host' if n == 1 else 'hosts'}:"]
    shown: list[tuple[str, list[int]]] = []
    for i, services in enumerate(value["hosts"]):
        text = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in services.items())
        if shown and shown[-1][0] == text:
            shown[-1][1].append(i)
        else:
            shown.append((text, [i]))
    for text, numbers in shown:
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines.append(f"  host {span}: {text}")
    lines += [f"note: {note}" for note in value["notes"]]
    return "\n".join([*lines, f"written to {value['folder']}; nothing is started yet. Start it with", value["command"]])
