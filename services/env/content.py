"""Digests of everything that determines an environment's tasks: data files, submitted code, package version.

Invariant: before the first episode of an environment in a run, its content is recorded in a file beside the submitted
environments; an environment that differs from the record is not played. Only content counts: the same bytes at another
path are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import blake3
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.env.catalogue import CatalogueEntry
from services.env.environments.text_to_sql.data import read_tasks
from services.env.submissions.store import SubmissionStore
from shared.errors import ConfigError
from shared.files import storage
from shared.run.checkpoint_files import digest
from shared.run.data import combined

FILE = "data.json"
_SPLITS = ("train", "eval")
_PACKAGES = {"reasoning_gym": "reasoning-gym", "gymnasium": "gymnasium"}
"""Package whose version determines the tasks of a kind of environment."""
_SHOWN = 16
_SOURCE = "source"
"""Name of the part that is a submitted environment's code."""


class ContentPart(BaseModel):
    """One part: `digest` is the hexadecimal blake3 of the file at `source`, or the version of a package."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    digest: str


type Content = Mapping[str, ContentPart]
"""Parts by name: `train`, `eval`, `databases/NAME`, `tools/database`, `source`, `package`."""
_RECORD = TypeAdapter(dict[str, dict[str, ContentPart]])


class ContentRecord:
    """Record of the content that a run has played.

    Args:
        folder: folder of the service, which holds the record.
        store: the submitted environments.
        allow_changed_code: play a submitted environment although its files differ from the record.
    """

    def __init__(self, folder: Path, store: SubmissionStore, *, allow_changed_code: bool = False) -> None:
        self._file, self._store = folder / FILE, store
        self._allowed = frozenset({_SOURCE}) if allow_changed_code else frozenset[str]()
        self._contents: dict[str, Content] = {}
        self._lock = asyncio.Lock()

    def of(self, name: str) -> dict[str, Any] | None:
        """The environment's content as GET /environments returns it; None if it has none or was not played yet."""
        parts = self._contents.get(name)
        if not parts:
            return None
        digests = combined({part: one.digest for part, one in parts.items()})
        return {"digests": digests, "parts": {part: one.model_dump() for part, one in parts.items()}}

    async def ensure_all(self, entries: Iterable[CatalogueEntry]) -> None:
        """Record the content of each entry. Raises what `ensure` does."""
        for entry in entries:
            await self.ensure(entry)

    def expected(self) -> dict[str, str]:
        """Digests of data files by path, for the processes that read them."""
        found = (one for parts in self._contents.values() for part, one in parts.items() if part in _SPLITS)
        return {one.source: one.digest for one in found}

    async def ensure(self, entry: CatalogueEntry) -> None:
        """Record the environment's content if it has no record yet.

        Raises ConfigError if it differs from the record or cannot be read; StorageUnavailable.
        """
        if entry.name in self._contents:
            return
        async with self._lock:
            self._contents[entry.name] = await asyncio.to_thread(self._checked, entry)

    def _checked(self, entry: CatalogueEntry) -> Content:
        found = dict(_parts(entry, self._store))
        record = _read(self._file)
        known = record.get(entry.name, {})
        for part, one in found.items():
            if part in known and known[part].digest != one.digest and part not in self._allowed:
                raise _changed(entry.name, part, known[part], one)
        if new := {part: one for part, one in found.items() if part not in known}:
            with storage.storage(self._file.parent.parent):
                self._file.parent.mkdir(parents=True, exist_ok=True)
            record[entry.name] = {**known, **new}
            storage.replace(self._file, _RECORD.dump_json(record, indent=1))
        return found


def _changed(env: str, part: str, was: ContentPart, now: ContentPart) -> ConfigError:
    if part == "package":
        return ConfigError(
            f"{env}: {now.source} {now.digest} is installed, but the run began with {was.digest}",
            f"install {now.source}=={was.digest}, or start a new run",
        )
    moved = "" if was.source == now.source else f" (then at {was.source})"
    return ConfigError(
        f"{env}: {now.source} has changed since the run began: its digest is {now.digest[:_SHOWN]}, it was "
        f"{was.digest[:_SHOWN]}{moved}",
        "restore the file, or start a new run: tasks and evaluations before and after the change would differ",
    )


def _parts(entry: CatalogueEntry, store: SubmissionStore) -> Iterator[tuple[str, ContentPart]]:
    """List the parts of an entry's content. Raises ConfigError for a file that cannot be read."""
    config = entry.config
    if (package := _PACKAGES.get(entry.kind)) is not None:
        yield "package", ContentPart(source=package, digest=metadata.version(package))
    for part in _SPLITS:
        if isinstance(path := config.get(part), str):
            yield part, _of_file(Path(path))
    for file in _databases(entry.kind, config):
        yield f"databases/{file.name}", _of_file(file)
    tools = config.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        sql = tool.get("sql") if isinstance(tool, Mapping) else None
        if isinstance(sql, Mapping) and isinstance(path := sql.get("database"), str):
            yield "tools/database", _of_file(Path(path))
    name, _, number = entry.name.partition("@")
    source = store.folder / name / number / "source"
    if number.isdecimal() and source.is_dir():
        yield _SOURCE, ContentPart(source=str(source), digest=_of_tree(source))


def _databases(kind: str, config: Mapping[str, Any]) -> Iterable[Path]:
    """Databases named by the tasks of text-to-SQL."""
    if kind != "text_to_sql" or not config.get("databases"):
        return ()
    files = [Path(path) for part in _SPLITS if isinstance(path := config.get(part), str)]
    tasks = (task for file in files for task in read_tasks(file, Path(config["databases"])))
    return sorted({Path(task.source["file"]) for task in tasks if "file" in task.source})


def _of_file(path: Path) -> ContentPart:
    try:
        return ContentPart(source=str(path.absolute()), digest=digest(path))
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}", "give an existing file") from error


def _of_tree(folder: Path) -> str:
    """blake3 over names and digests of all files in a folder, recursively."""
    found = blake3.blake3()
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and "__pycache__" not in one.parts):
        found.update(f"{path.relative_to(folder)}\0{digest(path)}\0".encode())
    return found.hexdigest()


def _read(file: Path) -> dict[str, dict[str, ContentPart]]:
    try:
        return _RECORD.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "restore the file") from error
