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

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.env.catalogue import CatalogueEntry
from services.env.environments.kinds import kinds
from shared.errors import ConfigError
from shared.files import storage
from shared.run.checkpoint_files import digest
from shared.run.data import SOURCE, combined, tree_digest

FILE = "data.json"
_SPLITS = ("train", "eval")
_SHOWN = 16


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
        submitted: folder of the submitted environments.
        allow_changed_code: play a submitted environment although its files differ from the record.
    """

    def __init__(self, folder: Path, submitted: Path, *, allow_changed_code: bool = False) -> None:
        self._file, self._submitted = folder / FILE, submitted
        self._allowed = frozenset({SOURCE}) if allow_changed_code else frozenset[str]()
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
        found = dict(_parts(entry, self._submitted))
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


def _parts(entry: CatalogueEntry, submitted: Path) -> Iterator[tuple[str, ContentPart]]:
    """Return the parts of an entry's content. Raises ConfigError for a file that cannot be read."""
    config, kind = entry.config, kinds().get(entry.kind)
    if kind is not None and kind.distribution is not None:
        yield "package", ContentPart(source=kind.distribution, digest=metadata.version(kind.distribution))
    for part in _SPLITS:
        if isinstance(path := config.get(part), str):
            yield part, _of_file(Path(path))
    for part, file in kind.files(config) if kind is not None and kind.files is not None else ():
        yield part, _of_file(file)
    tools = config.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        sql = tool.get("sql") if isinstance(tool, Mapping) else None
        if isinstance(sql, Mapping) and isinstance(path := sql.get("database"), str):
            yield "tools/database", _of_file(Path(path))
    name, _, number = entry.name.partition("@")
    source = submitted / name / number / SOURCE
    if number.isdecimal() and source.is_dir():
        yield SOURCE, ContentPart(source=str(source), digest=tree_digest(source))


def _of_file(path: Path) -> ContentPart:
    try:
        return ContentPart(source=str(path.absolute()), digest=digest(path))
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}", "give an existing file") from error


def _read(file: Path) -> dict[str, dict[str, ContentPart]]:
    try:
        return _RECORD.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "restore the file") from error
