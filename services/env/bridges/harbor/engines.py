"""Engines whose containers Volley labels, isolates and removes: their commands."""

import contextlib
import functools
import hashlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ENGINES = {"docker": "docker", "podman": "podman"}
"""Command of the engine, by type of environment, where containers have Compose files and labels."""
OWNER = re.compile(r"volley-([0-9a-f]{6})-(\d+)-([\w-]+)")
PROJECT = re.compile(rf"({OWNER.pattern})-[0-9a-f]{{8}}__")


@functools.cache
def owner() -> str:
    """Name of this process that no later process has: its machine, pid and start. Projects begin with it."""
    return f"volley-{machine()}-{os.getpid()}-{started_at(os.getpid())}"


def machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def started_at(pid: int) -> str:
    """Start of a process; empty if it has ended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return ""
    command, same = ["ps", "-o", "lstart=", "-p", str(pid)], {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    text = subprocess.run(command, capture_output=True, encoding="utf-8", env=same, check=False).stdout
    return "".join(filter(str.isalnum, text)).lower()


def left_over(command: str) -> list[tuple[str, str]]:
    """Compose projects of workers of this machine that are gone, or this one's, with the number of their episode.

    Images of such projects are listed by their own names, which begin with the project's.
    """
    shown, found = '{{.Label "com.docker.compose.project"}}', set[str]()
    for kind, options in (("container", ["--all"]), ("network", [])):
        found |= set(engine(command, kind, "ls", *options, "--format", shown).split())
    found |= set(engine(command, "image", "ls", "--format", "{{.Repository}}").split())
    projects = [(project, PROJECT.match(project)) for project in found]
    return [
        (project, parts[0].removesuffix("__"))
        for project, parts in projects
        if parts is not None and (parts[1] == owner() or has_ended(parts[1]))
    ]


def has_ended(name: str) -> bool:
    """True if `name` is an `owner` of this machine that has ended."""
    parts = OWNER.fullmatch(name)
    return parts is not None and parts[1] == machine() and started_at(int(parts[2])) != parts[3]


def remove(command: str, project: str) -> None:
    """Remove what a Compose project, or an image, has left."""
    label = f"label=com.docker.compose.project={project}"
    for kind, options in (("container", ["--all"]), ("network", []), ("volume", [])):
        names = engine(command, kind, "ls", *options, "--quiet", "--filter", label).split()
        if names:
            engine(command, kind, "rm", "--force", *(["--volumes"] if kind == "container" else []), *names)
    for chosen in (label, f"reference={project}"):
        if images := engine(command, "image", "ls", "--quiet", "--filter", chosen).split():
            engine(command, "image", "rm", "--force", *images)


def sizes(command: str) -> list[tuple[str, float]]:
    """Episode and MiB of files, of each container of this worker."""
    shown, mine = '{{.Label "volley.episode"}}\t{{.Size}}', f"label=volley.owner={owner()}"
    found = []
    for line in engine(command, "ps", "--size", "--filter", mine, "--format", shown).splitlines():
        number, _, size = line.partition("\t")
        found.append((number, mebibytes(size.split(" ")[0])))
    return found


def mebibytes(text: str) -> float:
    """MiB of a size like 12.3MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("KB", 1e3), ("B", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor / 2**20
    return 0.0


def engine(command: str, *arguments: str) -> str:
    """Output of the engine's command; empty if it fails."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, encoding="utf-8", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
