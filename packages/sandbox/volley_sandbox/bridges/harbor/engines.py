"""Engines whose containers Volley labels, isolates and removes: their commands.

Invariant: a process removes only its own containers, and those whose process has surely ended. It knows that of
processes in its own pid namespace, and of those that had its folder before, which only one process at a time may hold.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ENGINES = {"docker": "docker", "podman": "podman"}
"""Command of the engine, by type of environment, where containers have Compose files and labels."""
OWNER = re.compile(r"volley-([0-9a-f]{6})([0-9a-f]{6})-(\d+)-(\w*)")
PROJECT = re.compile(rf"({OWNER.pattern})-[0-9a-f]{{8}}__")


@dataclass(frozen=True)
class Owner:
    """A process that has containers. `name` is one that no later process has; projects begin with it.

    `place` stands for its folder, and `alone` says that no other process has that.
    """

    name: str
    place: str
    alone: bool

    def may_remove(self, other: str) -> bool:
        """True if the process of that name is this one, or has ended."""
        parts = OWNER.fullmatch(other)
        if parts is None or other == self.name:
            return parts is not None
        here = parts[1] == machine() and has_ended(int(parts[3]), parts[4])
        return here or (self.alone and parts[2] == self.place)


@functools.cache
def owner_in(folder: Path) -> Owner:
    """This process as the owner of containers. It holds the folder until it ends, unless another process does."""
    place, alone = _hold(folder / "owner")
    return Owner(f"volley-{machine()}{place}-{os.getpid()}-{started_at(os.getpid())}", place, alone)


def _hold(path: Path) -> tuple[str, bool]:
    """Lock a file until this process ends; return the name in it, or another name if it is locked already."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if re.fullmatch("[0-9a-f]{6}", place := os.read(file, 64).decode(errors="replace")):
                return place, True
            os.ftruncate(file, 0)
            os.pwrite(file, (place := secrets.token_hex(3)).encode(), 0)
        except OSError:
            os.close(file)
        else:
            return place, True
    return secrets.token_hex(3), False


@functools.cache
def machine() -> str:
    """Name of the machine since its start, and of the processes that are visible here."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text("utf-8"), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:6]


def has_ended(pid: int, start: str) -> bool:
    """True if the process that started at `start` has surely ended. A mount with hidepid hides those of other users."""
    if found := started_at(pid):
        return found != start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def started_at(pid: int) -> str:
    """Start of a process, in letters and digits; empty if it has ended or is not visible."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return ""
    command, same = ["ps", "-o", "lstart=", "-p", str(pid)], {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    text = subprocess.run(command, capture_output=True, encoding="utf-8", env=same, check=False).stdout
    return "".join(filter(str.isalnum, text)).lower()


def left_over(command: str, owner: Owner) -> list[tuple[str, str]]:
    """Compose projects that the owner may remove, its own ones too, with the number of their episode.

    Images of such projects are listed by their own names, which begin with the project's.
    """
    found = set[str]()
    for kind, options in (("container", ["--all"]), ("network", [])):
        lines = engine(command, kind, "ls", *options, "--format", "{{.Labels}}").splitlines()
        found |= {label_of(line, "com.docker.compose.project") for line in lines}
    found |= set(engine(command, "image", "ls", "--format", "{{.Repository}}").split())
    projects = [(project, PROJECT.match(project)) for project in found]
    return [
        (project, parts[0].removesuffix("__"))
        for project, parts in projects
        if parts is not None and owner.may_remove(parts[1])
    ]


def remove(command: str, project: str) -> None:
    """Remove a Compose project's or an image's remains."""
    label = f"label=com.docker.compose.project={project}"
    for kind, options in (("container", ["--all"]), ("network", []), ("volume", [])):
        names = engine(command, kind, "ls", *options, "--quiet", "--filter", label).split()
        if names:
            engine(command, kind, "rm", "--force", *(["--volumes"] if kind == "container" else []), *names)
    for chosen in (label, f"reference={project}"):
        if images := engine(command, "image", "ls", "--quiet", "--filter", chosen).split():
            engine(command, "image", "rm", "--force", *images)


def sizes(command: str, owner: Owner) -> Counter[str]:
    """MiB of files in the containers of each episode of an owner, those of all its services together."""
    found = Counter[str]()
    mine = f"name={owner.name}"  # sizes of other containers of the machine would take their time
    for line in engine(command, "ps", "--size", "--filter", mine, "--format", "{{.Size}}\t{{.Labels}}").splitlines():
        size, _, labels = line.partition("\t")
        parts = PROJECT.match(label_of(labels, "com.docker.compose.project"))
        if parts is not None and parts[1] == owner.name:
            found[parts[0].removesuffix("__")] += mebibytes(size.split(" ")[0])
    return found


def logs_size(trial: Path) -> float:
    """MiB of the files below /logs in a trial's containers, without following links.

    Harbor's copies of artifacts lie beside them, and do not count.
    """
    blocks = dict[tuple[int, int], int]()
    for mounted in ("agent", "verifier", "artifacts/logs/artifacts"):
        for place, _, names in os.walk(trial / mounted):
            for name in names:
                with contextlib.suppress(OSError):
                    about = os.lstat(os.path.join(place, name))
                    blocks[about.st_dev, about.st_ino] = about.st_blocks
    return sum(blocks.values()) * 512 / 2**20


def label_of(shown: str, name: str) -> str:
    """Value of a label, empty if it is absent, where Docker shows name=value, and Podman name:value or name=value."""
    found = re.search(rf"(?:^|[\[ ,]){re.escape(name)}[=:]([^ ,\]]*)", shown)
    return found[1] if found else ""


def mebibytes(text: str) -> float:
    """MiB of a size like 12.3MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("KB", 1e3), ("B", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor / 2**20
    return 0.0


def answers(command: str) -> bool:
    """True if the engine itself answers, rather than its command alone."""
    try:
        return subprocess.run([command, "ps", "--quiet"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def engine(command: str, *arguments: str) -> str:
    """Output of the engine's command; empty if it fails."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, encoding="utf-8", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
