"""Scripts that start a run on several hosts: an sbatch script, a task of SkyPilot, a script of gcloud commands.

Each is a head of settings, made here, and one of the plain files in `deploy/`. They hold paths and names, no secrets.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared import boot
from shared.config import LoadedConfig
from shared.errors import ConfigError
from volley.layout import PROJECT
from volley_launch.folder import LaunchFolder

_STOP_S = 120
"""Least time that the services get to stop, in seconds: between Slurm's warning and the time limit, for example."""
REMOTE = "volley-launch"
"""Name of the launch folder in the home folder of a host that shares no file system with this one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A TPU slice to create: its name, and its type, such as v4-8."""

    name: str
    type: str


def slurm(loaded: LoadedConfig, launch: LaunchFolder, volley: Path, n_nodes: int, options: Sequence[str]) -> str:
    """Return an sbatch script for `n_nodes` nodes; `options` are options of sbatch. Raises ConfigError."""
    n_trainers = loaded.config.services.trainer.num_processes
    lines = [
        f"--job-name=volley-{loaded.config.run.name}",
        f"--nodes={n_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--open-mode=append",
        f"--output={str(launch.path).replace('%', '%%')}/slurm-%j.log",
        f"--signal=B:USR1@{_stop_s(loaded)}",
        *options,
    ]
    _check_options("--sbatch", lines, "--partition=gpu")
    head = {
        "folder": launch.path,
        "run": loaded.config.run.folder,
        "volley": volley,
        "trainers": n_trainers,
        "needed": min(n_nodes, n_trainers + 1),
    }
    directives = [f"#SBATCH {_directive(line)}" for line in lines]
    return "\n".join(["#!/bin/bash", *directives, *_settings(head), "", _body("slurm/job.sh")])


def _stop_s(loaded: LoadedConfig) -> int:
    """Time for all services to stop in order, in seconds."""
    return max(_STOP_S, round(3 * (loaded.config.services.limits.grace_s + boot.CLEANUP_S)))


def _check_options(name: str, options: Sequence[str], example: str) -> None:
    """Raises ConfigError for words that are no options of another program. `name` is the argument that passes them."""
    for option in options:
        if not re.match(r"-\S", option) or "\n" in option:
            raise ConfigError(f"{name} {option!r} is not an option", f"write {name}={example}")


def _directive(option: str) -> str:
    """Quote an option as sbatch reads it."""
    if re.fullmatch(r"[\w@%+=:,./-]+", option):
        return option
    name, equals, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"' if equals else option


def sky(
    loaded: LoadedConfig, launch: LaunchFolder, files: Mapping[str, Path], n_nodes: int, resources: Mapping[str, Any]
) -> str:
    """Return a task of SkyPilot; `files` are local files by their path in the hosts' home folder."""
    mounts = {f"~/{path}": str(local) for path, local in files.items()}
    task = {
        "name": slug(loaded.config.run.name),
        "num_nodes": n_nodes,
        "resources": dict(resources),
        "workdir": str(PROJECT),
        "file_mounts": {
            f"~/{REMOTE}/run.yaml": str(launch.config),
            f"~/{REMOTE}/secrets": str(launch.secrets),
            **mounts,
        },
        "setup": f"VOLLEY_ACCELERATOR={loaded.config.rollout.engine.device} make install\n",
        "run": _body("sky/run.sh"),
    }
    return yaml.dump(task, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def tpu_vm(
    loaded: LoadedConfig,
    launch: LaunchFolder,
    files: Mapping[str, Path],
    slices: Sequence[Slice],
    gcloud: Mapping[str, str],
    create: Sequence[str],
) -> str:
    """Return a script of gcloud commands. Raises ConfigError.

    Args:
        files: local files by their path in the hosts' home folder.
        slices: the trainer's first.
        gcloud: settings `zone` and `project`.
        create: more options of the command that creates a slice.
    """
    _check_options("--create", create, "--spot")
    head: dict[str, Any] = {
        "folder": launch.path,
        "project_folder": PROJECT,
        "trainers": loaded.config.services.trainer.num_processes,
        "accelerator": loaded.config.rollout.engine.device,
        "patience": _stop_s(loaded),
        **gcloud,
    }
    arrays = {
        "slices": [one.name for one in slices],
        "types": [one.type for one in slices],
        "create_options": create,
        "files": [word for path, local in files.items() for word in (local, path)],
    }
    return "\n".join(["#!/bin/bash", *_settings(head, arrays), "", _body("tpu-vm/run.sh")])


def slug(name: str) -> str:
    """Return the name as cloud resources may be called: lower-case letters, digits and hyphens, from a letter on.

    A name that is changed for this gets a hash, so that two runs never have the same.
    """
    made = re.sub(r"[^a-z0-9]+", "-", f"volley-{name}".lower()).strip("-")[:50].rstrip("-")
    if made == f"volley-{name}":
        return made
    return f"{made[:43].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _settings(values: Mapping[str, Any], arrays: Mapping[str, Sequence[Any]] | None = None) -> list[str]:
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    more = {name: " ".join(shlex.quote(str(word)) for word in words) for name, words in (arrays or {}).items()}
    return [*lines, *(f"{name}=({words})" for name, words in more.items())]


def _body(name: str) -> str:
    return (PROJECT / "deploy" / name).read_text(encoding="utf-8")
