"""A run's folder from the supervisor's side: made once, continued only by the same configuration, used by one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from services.cli import reaper
from services.cli.layout import PROJECT, RunFolder
from shared import config
from shared.config import Loaded
from shared.errors import ConfigError
from shared.storage import replace

_ORPHANS_S = reaper.GRACE_S + 10.0
"""How long the processes of a supervisor that was killed may take to end, in seconds."""
_PACKAGES = ("jax", "flax", "sglang-jax", "google-tunix", "orbax-checkpoint")
_IRRELEVANT = ("services.", "run.dir", "orchestrator.max_concurrent_episodes", "orchestrator.lease_s", "orchestrator.episode_timeout_s")


@dataclass(frozen=True, slots=True)
class Record:
    """What run.json says: what the run is, where it was started, and how long it has been worked on, in seconds."""

    digest: str
    seed: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    created: float
    elapsed_s: float
    finished: bool
    cwd: str = "."


_RECORD = TypeAdapter(Record)


class Claim(NamedTuple):
    """A run that is ours for as long as the file descriptor `lock`, or a copy of it that a child has inherited, is open."""

    folder: RunFolder
    record: Record
    lock: int


@contextmanager
def claimed(loaded: Loaded, say: Callable[[str], None] = print) -> Iterator[Claim]:
    """Makes the run's folder, or takes up the one that exists, for this process alone.

    Where a supervisor was killed, it waits until the last process of it has ended.
    Raises ConfigError: another process works on it, it belongs to another configuration, or it is finished.
    """
    folder = RunFolder(loaded.config.run.folder.absolute())
    try:
        for path in (folder.path, folder.logs):
            path.mkdir(parents=True, exist_ok=True)
        folder.secrets.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder {folder.path}: {error.strerror}", "choose another with run.dir=…") from error
    with _locked(folder, say) as lock:
        record = _continued(folder, loaded) or _new(loaded)
        replace(folder.config, loaded.to_yaml().encode())
        write_record(folder, record)
        yield Claim(folder, record, lock)


def stored(run_dir: Path, overrides: Sequence[str] = ()) -> tuple[Loaded, Record]:
    """The configuration that a run's folder holds, wherever the folder is now, and its record. Raises ConfigError."""
    folder = RunFolder(run_dir.absolute())
    if not folder.path.is_dir():
        raise ConfigError(f"{run_dir}: no such folder", "give a run's folder to continue it, or --config FILE.yaml to start a run")
    record = read_record(folder)
    if record is None:
        problem = "cannot be read" if folder.record.exists() else "is missing"
        raise ConfigError(f"{run_dir} is not a run that can be continued: its run.json {problem}", "start one with --config FILE.yaml")
    loaded = config.load([folder.config], overrides)
    name = loaded.config.run.name
    if name != folder.name:
        raise ConfigError(f"{run_dir} holds the run {name}", f"a run's folder has its name: call it {name} again")
    return config.validate({**loaded.tree, "run": {**(loaded.tree.get("run") or {}), "name": name, "dir": str(folder.path.parent)}}), record


def read_record(folder: RunFolder) -> Record | None:
    """None if the folder is not that of a run, or its record cannot be read."""
    with contextlib.suppress(OSError, ValidationError):
        return _RECORD.validate_json(folder.record.read_bytes(), strict=True)
    return None


def write_record(folder: RunFolder, record: Record) -> None:
    write_json(folder.record, record)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file in one step, so that a reader sees all or nothing. Raises StorageFull."""
    replace(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))


def secret(folder: RunFolder, name: str) -> Path:
    """A file with a random word that only this user can read, made at its first use."""
    path = folder.secrets / name
    with contextlib.suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(24))
    return path


def relevant(loaded: Loaded) -> dict[str, Any]:
    """The configuration with defaults filled in, flat, without what may change between two sessions of a run."""
    flat: dict[str, Any] = {}
    _flatten("", orjson.loads(loaded.config.model_dump_json()), flat)
    return {key: value for key, value in flat.items() if not key.startswith(_IRRELEVANT)}


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    else:
        into[prefix] = value


def _continued(folder: RunFolder, loaded: Loaded) -> Record | None:
    record = read_record(folder)
    if record is None:
        if folder.record.exists() or folder.metrics.exists():
            raise ConfigError(f"{folder.path} holds files but no readable run.json", "choose another run.name=…")
        return None
    now = relevant(loaded)
    differing = sorted(key for key in {*now, *record.config} if now.get(key) != record.config.get(key))
    if differing:
        changes = ", ".join(f"{key} (was {record.config.get(key)!r}, now {now.get(key)!r})" for key in differing[:5])
        raise ConfigError(f"run {folder.name} in {folder.path} was started with another configuration: {changes}", "choose run.name=…")
    if record.finished:
        raise ConfigError(
            f"run {folder.name} in {folder.path} is finished", f"choose run.name=… to train again; `volley report {folder.path}` shows it"
        )
    return record


def _new(loaded: Loaded) -> Record:
    seed = loaded.config.run.seed
    return Record(loaded.digest, seed, relevant(loaded), _versions(), time.time(), elapsed_s=0.0, finished=False, cwd=str(Path.cwd()))


def _versions() -> dict[str, str]:
    """Of Volley, Python, and the libraries of the three environments as the lock names them."""
    found = {"volley": version("volley"), "python": sys.version.split()[0]}
    lock = PROJECT / "uv.lock"
    if lock.exists():
        import tomllib

        packages = tomllib.loads(lock.read_text())["package"]
        for name in _PACKAGES:
            found[name] = ", ".join(str(p["version"]) for p in packages if p["name"] == name)
    return found


@contextmanager
def _locked(folder: RunFolder, say: Callable[[str], None]) -> Iterator[int]:
    """Yields the descriptor of the lock. Raises ConfigError if another process holds the run."""
    with (folder.path / ".lock").open("a+") as file:
        _lock(file, folder, say)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: IO[str], folder: RunFolder, say: Callable[[str], None]) -> None:
    """Waits, within bounds, if whoever held the run is gone: the reaper keeps the lock until all it has to end has ended."""
    deadline, waiting = time.monotonic() + _ORPHANS_S, False
    while not _try_lock(file):
        file.seek(0)
        holder = file.read().strip() or "?"
        if _lives(holder) or time.monotonic() > deadline:
            raise ConfigError(f"run {folder.name} in {folder.path} is being trained by process {holder}", "choose run.name=…")
        if not waiting:
            say(f"waiting for what process {holder}, which is gone, has left running")
        waiting = True
        time.sleep(0.1)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, ProcessLookupError):
        return False
    return True
