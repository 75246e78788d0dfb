"""A run's folder and its run.json, as the supervisor uses them.

A folder is made once, continued only with a compatible configuration, and used by one process at a time.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.locks import try_lock
from shared.files.reading import open_file, read_file
from shared.files.storage import replace, storage
from shared.models import content
from shared.models.hub import keep
from shared.models.origin import LATEST, Origin
from shared.run import commits, pinned, trust
from shared.run.checkpoint_files import MANIFEST
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.visible import quoted
from volley import reaper
from volley.layout import PROJECT
from volley.printing import print_lines
from volley.runs import first_start, untrained
from volley.runs.run_file import Amendment, RunRecord, read_record, write_record
from volley.session_files import write_private

_ORPHANS_S = reaper.GRACE_S + reaper.KILLED_S + 10.0
"""Time for the processes of a killed supervisor to end, in seconds."""
_DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_PACKAGES = ("jax", "flax", "sglang-jax", "google-tunix", "orbax-checkpoint")


class RunClaim(NamedTuple):
    """A run claimed by this process while the file descriptor `lock`, or a child's copy of it, is open."""

    folder: RunFolder
    record: RunRecord
    lock: int


@contextmanager
def claimed(
    loaded: LoadedConfig,
    say: Callable[[str], None] = print_lines,
    free: tuple[str, ...] = (),
    *,
    may_clear: bool = False,
) -> Iterator[RunClaim]:
    """Make the run's folder, or continue the existing one, exclusively for this process.

    After a supervisor was killed, waits until its last process has ended. A run without weights takes the new
    configuration; with `may_clear`, which needs all its services on this host, so does a run without a step, and its
    first weights and groups are removed. For any other, `say` gets each change. Raises ConfigError if another process
    works on the run, if a setting differs that may not change (and does not start with one of `free`), or if the run is
    finished.
    """
    folder = RunFolder(loaded.config.run.folder.absolute())
    try:
        for path in (folder.path, folder.logs):
            path.mkdir(parents=True, exist_ok=True)
        folder.secrets.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder {folder.path}: {error.strerror}", "choose another with run.dir=…") from error
    with _locked(folder, say) as lock:
        given = loaded
        loaded, origin = _completed(folder, given)
        if may_clear and _clear_if_changed(folder, loaded, say, free):
            loaded, origin = _completed(folder, given)
        record = _continued(folder, loaded, say, free) or _new(loaded)
        described = None if origin is None else dataclasses.asdict(origin)
        record = dataclasses.replace(record, origin=described, failed=None)
        replace(folder.config, loaded.to_yaml().encode())
        write_record(folder, record)
        trust.mark(folder)
        yield RunClaim(folder, record, lock)


def _completed(folder: RunFolder, loaded: LoadedConfig) -> tuple[LoadedConfig, Origin | None]:
    """Add the date and the content of models and files to a configuration, and the origin of weights of another run."""
    origin = keep(loaded.config)
    if origin is not None:
        loaded = config.changed(loaded, {"model.path": origin.path})
    record = read_record(folder)
    loaded = dated(loaded, record)
    return first_start.with_content(loaded, folder, {} if record is None else record.config), origin


def dated(loaded: LoadedConfig, record: RunRecord | None) -> LoadedConfig:
    """Set run.date: the date of the run's first start, today for a new run."""
    if loaded.config.run.date is not None:
        return loaded
    first = datetime.datetime.now(datetime.UTC) if record is None else _utc(record.created)
    known = None if record is None else record.config.get("run.date")
    return config.changed(loaded, {"run.date": known or first.date().isoformat()})


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def stored(run_dir: Path, overrides: Sequence[str] = ()) -> tuple[LoadedConfig, RunRecord]:
    """Load the configuration and the record of a run's folder, which may have been moved. Raises ConfigError.

    Relative paths in it count from the folder in which the run was started, those of `overrides` from the working
    directory.
    """
    folder = RunFolder(run_dir.absolute())
    if not folder.record.exists() and ((folder.path / "config.json").is_file() or _named_files(overrides)):
        raise ConfigError(f"{run_dir} is a model, not a run", f"add {_training_options(overrides)}")
    if not folder.path.is_dir():
        is_file = run_dir.suffix in (".yaml", ".yml") or run_dir.is_file()
        raise ConfigError(
            f"{run_dir}: {'is a file, not a run' if run_dir.is_file() else 'no such folder'}",
            f"did you mean --config {quoted(run_dir)}?" if is_file else RunFolder(run_dir).hint(),
        )
    record = read_record(folder)
    for path in (folder.record, folder.config):
        if not path.exists():
            raise ConfigError(
                f"{run_dir} is not a run that can be continued: its {path.name} is missing",
                f"to continue it, use `volley train --config FILE.yaml {quoted(f'run.dir={folder.path.parent}')}"
                f" {quoted(f'run.name={folder.name}')}` with the configuration it was started with",
            )
    if record is None:
        raise ConfigError(
            f"{run_dir} is not a run that can be continued: its run.json cannot be read",
            "remove run.json and repeat the command that started the run",
        )
    name = config.stored(folder.path).config.run.name
    if name != folder.name:
        raise ConfigError(
            f"{run_dir} contains run {name}", f"a run's folder must have the run's name: rename it to {name}"
        )
    loaded = config.stored(folder.path, overrides)
    if (other := loaded.config.run.name) != name:
        raise ConfigError(
            f"run.name (was {name}, now {other}) may not change",
            "remove it; to start another run, use --config FILE.yaml",
        )
    return config.changed(loaded, {"run.name": name, "run.dir": str(folder.path.parent)}), record


def _named_files(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the data and Python files among arguments after a model; None if there are none."""
    data = [one for one in words if Path(one).suffix in _DATA and "=" not in one]
    python = [one for one in words if Path(one).suffix == ".py" and "=" not in one]
    return (data, python) if data or python else None


def _training_options(words: Sequence[str]) -> str:
    """Return options that train a model on the files among the arguments."""
    data, python = _named_files(words) or ([], [])
    if python and not data:
        return f"--env {quoted(python[0])}, or --data FILE --reward {quoted(python[0])}"
    reward = quoted(python[0]) if python else "FILE.py"
    return f"--data {quoted(data[0]) if data else 'FILE'} --reward {reward}" + ("" if data else ", or --env FILE")


def secret(folder: RunFolder, name: str, word: str | None = None) -> Path:
    """Write a secret to a file that only this user can read. Raises ConfigError.

    The secret is `word`, or random; a complete random one is kept between starts.
    """
    path = folder.secrets / name
    try:
        if word is not None or not _is_whole(path):
            write_private(path, (word or secrets.token_hex(24)).encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "remove it") from error
    return path


def _is_whole(path: Path) -> bool:
    try:
        return re.fullmatch(rb"[0-9a-f]{48}", read_file(path, 48)) is not None
    except OSError:
        return False


def mark_finished(folder: RunFolder, record: RunRecord) -> RunRecord:
    """Mark a run finished in its record, with its last version and the settings in force by its checkpoints."""
    head = commits.newest(folder)
    record = dataclasses.replace(record, finished=True)
    if head is not None:
        in_force = _content(record) | dict(pinned.in_force(head.settings, head.epoch) or record.config)
        amendments = _amendments(record, head, in_force)
        record = dataclasses.replace(record, final=str(head.version), config=in_force, amendments=amendments)
        _agree(folder, in_force)
    write_record(folder, record)
    return record


def _agree(folder: RunFolder, in_force: Mapping[str, Any]) -> None:
    """Write the settings in force to config.yaml: an external trainer may have used others than we were given."""
    loaded = config.load([folder.config])
    changed = pinned.changes(pinned.relevant(loaded.config), in_force)
    if changed:
        values = {change.key: change.now for change in changed}
        replace(folder.config, config.changed(loaded, values).to_yaml().encode())
        trust.mark(folder)


def _clear_if_changed(
    folder: RunFolder, loaded: LoadedConfig, say: Callable[[str], None], free: tuple[str, ...]
) -> bool:
    """Clear a run that has begun without a step, if its settings may not change to these; return True if it was."""
    record = read_record(folder)
    if record is None or record.finished or not _has_begun(folder):
        return False
    try:
        _amended(folder, record, loaded, lambda line: None, free)
    except ConfigError as error:
        if not untrained.may_be_cleared(folder, loaded.config):
            return False
        say(f"{error.detail}: no step was trained, so its first weights, evaluations and groups are removed")
        untrained.clear(folder)
        return True
    return False


def _continued(
    folder: RunFolder, loaded: LoadedConfig, say: Callable[[str], None], free: tuple[str, ...]
) -> RunRecord | None:
    record = read_record(folder)
    if record is None:
        head = commits.newest(folder)
        if folder.record.exists() or (folder.metrics.exists() and not (head and head.settings)):
            raise ConfigError(f"{folder.path} holds files but no readable run.json", "choose another run.name=…")
        # services that were started by hand have trained it
        return _amended(folder, _new(loaded), loaded, say, free) if head else None
    if record.finished or _has_begun(folder):
        return _amended(folder, record, loaded, say, free)
    return _replaced(folder, record, loaded, say)


def _replaced(folder: RunFolder, record: RunRecord, loaded: LoadedConfig, say: Callable[[str], None]) -> RunRecord:
    """Record of a run that has trained nothing, with its new configuration."""
    untrained.sweep(folder)
    if differing := pinned.changes(record.config, pinned.relevant(loaded.config)):
        changes = "; ".join(map(str, differing[:5]))
        say(f"run {folder.name} has trained nothing yet: its configuration is replaced ({changes})")
        folder.choices.unlink(missing_ok=True)
    return dataclasses.replace(_new(loaded), created=record.created, elapsed_s=record.elapsed_s)


def _has_begun(folder: RunFolder) -> bool:
    """Return True if the run has a checkpoint, an ended ticket, a step or an evaluation made with its configuration."""
    files = (folder.ledger, folder.metrics, folder.evals)
    return any(file.exists() and file.stat().st_size for file in files) or any(folder.checkpoints.rglob(MANIFEST))


def _amended(
    folder: RunFolder, record: RunRecord, loaded: LoadedConfig, say: Callable[[str], None], free: tuple[str, ...]
) -> RunRecord:
    """Record of a continued run, whose settings may change from its newest step on. Raises ConfigError."""
    head, now = commits.newest(folder), pinned.relevant(loaded.config)
    step = head.step if head else 0
    was, where = _in_force(record, head), f"run {folder.name} in {folder.path}"
    try:
        first_start.check_files(was, loaded, folder)
        content.check(first_start.content_of(was), first_start.content_of(now), loaded.config.model.path)
        found = pinned.permitted(was, now, step=step, free=free)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.detail}", error.hint) from None
    if record.finished and loaded.config.is_supervised:
        other = "run.name=… " + quoted(f"model.path={folder.path}@{LATEST}")
        raise ConfigError(f"{where} is finished", f"continue from its weights in another run: {other}")
    if record.finished and (head is None or loaded.config.trainer.max_steps <= step):
        raise ConfigError(
            f"{where} is finished",
            f"extend it with `volley up {quoted(folder.path)} {pinned.MAX_STEPS}=N`, N above {step}, or choose another"
            f" run.name=…; `volley report {quoted(folder.path)}` shows it",
        )
    for change in found:
        say(f"{change} from step {step} on")
    amendments = _amendments(record, head, now)
    return dataclasses.replace(
        record, digest=loaded.digest, config=now, finished=False, final=None, amendments=amendments
    )


def _in_force(record: RunRecord, head: TrainerState | None) -> Mapping[str, Any]:
    """Settings of the newest checkpoint, or those of the run's start without one."""
    recorded = pinned.in_force(head.settings, head.epoch) if head else {}
    return _content(record) | (recorded or pinned.undone(record.config, [one.changes for one in record.amendments]))


def _content(record: RunRecord) -> dict[str, Any]:
    """Digests of the model's files, which checkpoints of services started by hand do not hold."""
    return {key: value for key, value in record.config.items() if key.startswith(pinned.CONTENT)}


def _amendments(record: RunRecord, head: TrainerState | None, now: Mapping[str, Any]) -> tuple[Amendment, ...]:
    """Changes along the lineage, then those that `now` adds; amendments already recorded keep their time."""
    found: list[tuple[int, dict[str, tuple[Any, Any]]]] = []
    began, before = dict(head.lineage) if head else {}, dict[str, Any]()
    for epoch, changed in head.settings if head else ():
        found += (
            [(began.get(epoch, 0), {key: (before.get(key), value) for key, value in changed.items()})] if before else []
        )
        before |= changed
    pending = pinned.changes(_in_force(record, head), now)
    found += [(head.step if head else 0, {c.key: (c.was, c.now) for c in pending})] if pending else []
    times = {(one.from_step, tuple(sorted(one.changes))): one.time for one in record.amendments}
    return tuple(
        Amendment(times.get((step, tuple(sorted(changed))), time.time()), step, changed) for step, changed in found
    )


def _new(loaded: LoadedConfig) -> RunRecord:
    seed, flat, cwd = loaded.config.run.seed, pinned.relevant(loaded.config), str(Path.cwd())
    config.check_text("the working directory", cwd)
    return RunRecord(loaded.digest, seed, flat, _versions(), time.time(), elapsed_s=0.0, finished=False, cwd=cwd)


def _versions() -> dict[str, str]:
    """Versions of Volley, Python, and the libraries in the lock file."""
    found = {"volley": version("volley-rl"), "python": sys.version.split()[0]}
    lock = PROJECT / "uv.lock"
    if lock.exists():
        import tomllib

        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["package"]
        for name in _PACKAGES:
            found[name] = ", ".join(str(p["version"]) for p in packages if p["name"] == name)
    return found


@contextmanager
def _locked(folder: RunFolder, say: Callable[[str], None]) -> Iterator[int]:
    """Lock the run, and yield the lock's file descriptor.

    Raises ConfigError if another process holds it, StorageFull if the disk is full.
    """
    with _lock_file(folder.path / ".lock") as file:
        _lock(file, folder, say)
        with storage(folder.path):
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield file.fileno()


def _lock_file(path: Path) -> IO[str]:
    """Open the lock file. Raises ConfigError if the path is not a regular file."""
    try:
        path.touch()
        open_file(path).close()
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "remove it, or choose another run.name=…") from error


def _lock(file: IO[str], folder: RunFolder, say: Callable[[str], None]) -> None:
    """Take the lock. If its holder is gone, wait for the reaper, which keeps the lock until all processes have ended.

    Raises ConfigError if the holder is alive, or after `_ORPHANS_S`.
    """
    deadline, waiting = time.monotonic() + _ORPHANS_S, False
    while not try_lock(file):
        file.seek(0)
        holder = file.read(32).strip() or "?"
        if _is_alive(holder) or time.monotonic() > deadline:
            another = quoted(f"run.name={folder.name}2")
            raise ConfigError(
                f"run {folder.name} in {folder.path} is being trained by process {holder}",
                f"start another with {another}, or watch this one: `volley status {quoted(folder.path)}`",
            )
        if not waiting:
            say(f"waiting for the processes that process {holder} left running when it ended")
        waiting = True
        time.sleep(0.1)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, ProcessLookupError):
        return False
    return True
