"""run.json, the record of a run; the name and identifier of a run's folder.

The Python client reads them, so that this module imports no libraries of configurations and tokenizers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from shared import codec
from shared.errors import ConfigError, DecodeError
from shared.files.locks import existing_lock_file, try_lock
from shared.files.reading import read_file
from shared.files.storage import replace
from shared.run.folder import RunFolder

_MAX_RECORD = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Amendment:
    """Settings changed in a run that has trained.

    `time`: seconds since 1970. `from_step`: first step with the new values. `changes`: (was, now) by key.
    """

    time: float
    from_step: int
    changes: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Content of run.json. Times are in seconds, `created` since 1970; `elapsed_s` counts only time worked.

    `config`: settings in force (see shared.run.pinned), after `amendments`. `cwd`: folder in which the run was started.
    `final`: last version of a finished run. `origin`: version of another run that it was started from (see
    shared.models.origin). `failed`: why the run has failed; None while it works, or after a stop.
    """

    digest: str
    seed: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    created: float
    elapsed_s: float
    finished: bool
    cwd: str = "."
    amendments: tuple[Amendment, ...] = ()
    final: str | None = None
    origin: Mapping[str, str] | None = None
    failed: str | None = None


_RECORD = TypeAdapter(RunRecord)


def read_record(folder: RunFolder) -> RunRecord | None:
    """Read run.json; None if the folder is not that of a run, or the record cannot be read."""
    with suppress(OSError, ValidationError, DecodeError):
        text = read_file(folder.record, _MAX_RECORD)
        codec.from_record(text, folder.record.name)
        return _RECORD.validate_json(text, strict=True)
    return None


def write_record(folder: RunFolder, record: RunRecord) -> None:
    write_json(folder.record, record)


def write_json(path: Path, value: Any) -> None:
    """Replace the file atomically. Raises StorageFull."""
    replace(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))


def began(folder: RunFolder) -> bytes:
    """Return the run's identifier, which changes when it is restarted in the emptied folder; empty if there is none."""
    with suppress(OSError):
        return read_file(folder.run_id, 1024)
    return b""


def name_of(folder: RunFolder) -> str:
    """Return the run's name in its record or configuration; a folder that was renamed may have another name."""
    record = read_record(folder)
    if record is not None and isinstance(name := record.config.get("run.name"), str):
        return name
    with suppress(ConfigError, ModuleNotFoundError):  # the client alone may lack the libraries of configurations
        from shared import config

        return config.recorded(folder.config).config.run.name
    return folder.name


def is_held(folder: RunFolder) -> bool:
    """Return True if a process on this machine works on the run."""
    descriptor = existing_lock_file(folder.path / ".lock")
    if descriptor is None:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
