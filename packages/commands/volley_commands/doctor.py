"""`volley doctor`: what is installed and usable on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from shared import packages
from shared.errors import ConfigError, VolleyError
from shared.process import host_memory
from shared.services import SERVICES
from volley.layout import installing, is_unmade, python_of
from volley.printing import join_lines, print_result
from volley.reporting.working import working
from volley.wheel import DISTRIBUTION
from volley_launch.accelerators import Kind, backend, find_accelerators
from volley_python.installing.uv import find_uv

type Level = Literal["ok", "note", "problem"]

_PACKAGES = {"base": DISTRIBUTION, "rollout": "sglang-jax", "trainer": "google-tunix"}
_LEAST_FREE, _LEAST_MEMORY = 5 * 2**30, 4 * 2**30
_ASK_S = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `fix` says what to do, empty if nothing is needed."""

    name: str
    level: Level
    text: str
    fix: str = ""


def add(parser: argparse.ArgumentParser) -> None:
    """Add no argument."""


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if there is a problem."""
    with working("checking this machine"):
        found = [one for check in _CHECKS for one in check()]
    print_result([asdict(one) for one in found], _text(found))
    return 1 if any(one.level == "problem" for one in found) else 0


def _text(found: Sequence[Finding]) -> str:
    width, lines = max(len(one.name) for one in found), list[str]()
    for one in found:
        mark = {"ok": "✓", "note": "·", "problem": "✗"}[one.level]
        lines.append(f"{mark} {one.name:{width}}  {one.text}")
        lines += [f"{'':{width}}    → {one.fix}"] if one.fix else []
    return join_lines(lines)


def _machine() -> Iterator[Finding]:
    system, cores = platform.system(), os.cpu_count() or 1
    if system == "Linux":
        cores = len(os.sched_getaffinity(0))
    text = f"{system} {platform.release()}, {platform.machine()}, {cores} {'core' if cores == 1 else 'cores'}"
    if system != "Linux":
        yield Finding("machine", "problem", text, "use Linux, or a container with it")
        return
    yield Finding("machine", "ok", text)
    memory = host_memory.measure().available
    level: Level = "ok" if memory >= _LEAST_MEMORY else "note"
    yield Finding("memory", level, f"{memory / 2**30:.1f} GiB available", "" if level == "ok" else "end other programs")


def _environments() -> Iterator[Finding]:
    for name, package in _PACKAGES.items():
        if is_unmade(name):
            yield Finding(f"environment {name}", "note", "not made yet", "the first command that needs it makes it")
            continue
        try:
            python = python_of(name)
            asked = f"import importlib.metadata as m, sys; print(m.version({package!r}), sys.version.split()[0])"
            found = _output([str(python), "-c", asked]).split()
            yield Finding(f"environment {name}", "ok", f"{package} {found[0]}, Python {found[1]}")
        except (VolleyError, OSError, subprocess.SubprocessError, IndexError):
            yield Finding(f"environment {name}", "problem", f"{package} is not installed there", installing())


def _tools() -> Iterator[Finding]:
    try:
        yield Finding("uv", "ok", str(find_uv()))
    except VolleyError as error:
        yield Finding("uv", "problem", error.detail, error.hint or "")
    try:
        from shared.queue import server

        yield Finding("Redis", "ok", f"embedded: {server.find_binary()}")
    except (VolleyError, ImportError, OSError) as error:
        yield Finding("Redis", "problem", str(error), f"{installing()}, or set services.redis_url")
    docker = shutil.which("docker")
    yield Finding("Docker", "ok" if docker else "note", docker or "not installed: only `docker compose` needs it")


def _accelerators() -> Iterator[Finding]:
    kinds: tuple[tuple[Kind, str], ...] = (("tpu", "TPU chips"), ("gpu", "GPUs"))
    for kind, name in kinds:
        try:
            found = find_accelerators(kind, os.environ)
        except ConfigError as error:
            yield Finding(name, "problem", error.detail, error.hint or "")
            continue
        installed = _backends(kind) if found.names else ""
        if not found.names:
            yield Finding(name, "note", "none")
        elif installed:
            shared = "; a run's trainer and rollout servers share it" if (kind, len(found.names)) == ("gpu", 1) else ""
            yield Finding(name, "ok", f"{len(found.names)}, and JAX has {installed}{shared}")
        else:
            fix = installing(kind)
            yield Finding(name, "problem", f"{len(found.names)}, but JAX is installed for CPUs only", fix)


def _backends(kind: Kind) -> str:
    """Name the packages with which JAX uses an accelerator; empty if trainer or rollout servers have none."""
    try:
        found = [backend(kind, name) for name in ("trainer", "rollout")]
    except (VolleyError, OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(sorted(set(found))) if all(found) else ""


def _sandbox() -> Iterator[Finding]:
    try:
        tier = orjson.loads(_output([str(python_of("base")), "-P", "-m", packages.program("sandbox_tier")]))
    except (VolleyError, OSError, subprocess.SubprocessError, orjson.JSONDecodeError) as error:
        yield Finding("sandbox", "problem", f"cannot be started: {error}", "see docs/sandbox.md")
        return
    missing = "; ".join(tier["missing"])
    level: Level = "ok" if tier["tier"] == 2 else "note" if tier["tier"] else "problem"
    fix = "" if level == "ok" else f"{missing or 'see docs/sandbox.md'}"
    how = ("not isolated", "partly isolated", "fully isolated")[tier["tier"]]
    yield Finding("sandbox", level, f"code of environments is {how} (tier {tier['tier']} of 2)", fix)


def _disk() -> Iterator[Finding]:
    folder = Path("runs") if Path("runs").is_dir() else Path()
    free = shutil.disk_usage(folder).free
    level: Level = "ok" if free >= _LEAST_FREE else "problem"
    fix = "" if level == "ok" else "free some space, or set run.dir"
    yield Finding("disk", level, f"{free / 2**30:.0f} GiB free for {folder.absolute()}", fix)
    if not os.access(folder, os.W_OK):
        yield Finding("runs", "problem", f"{folder.absolute()} is not writable", "set run.dir")


def _ports() -> Iterator[Finding]:
    taken = [f"{name} {info.port}" for name, info in SERVICES.items() if _is_taken(info.port)]
    if taken:
        text = f"taken: {', '.join(taken)}"
        yield Finding(
            "ports", "note", text, "`volley train` chooses free ones; services started by hand need another port"
        )
    else:
        yield Finding("ports", "ok", f"free: {', '.join(str(info.port) for info in SERVICES.values())}")


def _is_taken(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, timeout=_ASK_S, encoding="utf-8").stdout


_CHECKS: Sequence[Callable[[], Iterator[Finding]]] = (
    *(_machine, _environments, _tools, _accelerators, _sandbox, _disk, _ports),
)
