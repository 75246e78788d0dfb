"""Programs that sandboxes run for a version: its file or unpacked archive, with its declared dependencies.

A program is made when it is first needed, from files on disk: after a restart, no network is needed for earlier
versions. No code of a submission runs here (see sandbox.packages).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StorageDenied
from volley_sandbox.backends.harbor import HARBOR, read_config
from volley_sandbox.harbor.containers import Containers
from volley_sandbox.harbor.tasks import HarborTask, is_task_archive, read_tasks
from volley_sandbox.sandbox.limits import EnvironmentProgram
from volley_sandbox.sandbox.packages.archives import UnpackedArchive, unpack
from volley_sandbox.sandbox.packages.dependencies import (
    DependencyStore,
    check_python,
    check_requirement,
    read_metadata,
)
from volley_sandbox.submissions.record import SubmittedVersion
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import Submission, check_size, stored_files

MAIN, ARCHIVE = "environment.py", "environment.zip"


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """Files to store, by name, and the protocol if it is already known."""

    files: Mapping[str, bytes]
    protocol: str = ""


class AgentPrograms:
    """Programs of submitted versions.

    Args:
        folder: folder for unpacked archives and installed dependencies.
        index: the only package index.
        containers: read and play task folders.
    """

    def __init__(self, store: SubmissionStore, folder: Path, index: str, containers: Containers) -> None:
        self._store, self._unpacked, self.containers = store, folder / "unpacked", containers
        self._dependencies = DependencyStore(folder / "packages", index)
        self._made: dict[str, EnvironmentProgram] = {}
        self._tasks: dict[str, Mapping[str, Sequence[HarborTask]]] = {}

    async def check(self, wanted: Submission) -> CheckedSource:
        """Check a submission without running it, and return the files to store.

        Raises InputError, DecodeError, TooLarge naming the fault; Forbidden, Unavailable if task folders cannot be
        played.
        """
        if (remote := wanted.remote) is not None:
            return CheckedSource(stored_files(remote), remote.protocol)
        content = wanted.content
        check_size(content, archive=wanted.archive)
        if not wanted.archive:
            _check_declared(content.decode("utf-8-sig"))
            return CheckedSource({MAIN: content})
        unpacked = await asyncio.to_thread(unpack, content, self._unpacked)
        if await asyncio.to_thread(is_task_archive, unpacked.top):
            read_config(wanted.config or {})
            await asyncio.to_thread(read_tasks, unpacked.top, self.containers.read)
            return CheckedSource({ARCHIVE: content}, HARBOR)
        _check_archive(unpacked, wanted.entry)
        return CheckedSource({ARCHIVE: content})

    async def of(self, version: SubmittedVersion) -> EnvironmentProgram:
        """The program of a version.

        Raises InputError (a dependency cannot be installed), Unavailable (no index), StorageDenied (its files are
        gone).
        """
        made = self._made.get(version.full_name)
        if made is None:
            made = self._made[version.full_name] = await self._make(version)
        return made

    async def tasks_of(self, version: SubmittedVersion) -> Mapping[str, Sequence[HarborTask]]:
        """Tasks of a version that is an archive of task folders, by split.

        Raises InputError, StorageDenied, Forbidden, Unavailable.
        """
        tasks = self._tasks.get(version.full_name)
        if tasks is None:
            unpacked = await asyncio.to_thread(unpack, await self._content(version), self._unpacked)
            tasks = self._tasks[version.full_name] = await asyncio.to_thread(
                read_tasks, unpacked.top, self.containers.read
            )
        return tasks

    async def _make(self, version: SubmittedVersion) -> EnvironmentProgram:
        content = await self._content(version)
        if version.archive:
            return await self._of_archive(content, version)
        return await of_source(
            content.decode("utf-8-sig"), f"{version.name}.py", version.entry, version.config, self._dependencies
        )

    async def _content(self, version: SubmittedVersion) -> bytes:
        """Raises StorageDenied."""
        path = self._store.source(version) / (ARCHIVE if version.archive else MAIN)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise StorageDenied(f"the source of {version.full_name} cannot be read: {error}") from error

    async def _of_archive(self, content: bytes, version: SubmittedVersion) -> EnvironmentProgram:
        unpacked = await asyncio.to_thread(unpack, content, self._unpacked)
        module, entry = unpacked.locate(version.entry)
        installed = await self._dependencies.install(unpacked.requirements)
        folders = (unpacked.folder, *installed)
        return EnvironmentProgram(None, module, entry, version.config, module=module, folders=folders)


async def of_source(
    source: str, filename: str, entry: str | None, config: Mapping[str, Any], dependencies: DependencyStore
) -> EnvironmentProgram:
    """Make the program of one file. Raises InputError, TooLarge, Unavailable."""
    folders = await dependencies.install(_check_declared(source))
    return EnvironmentProgram(source, filename, entry, config, folders=folders)


def _check_declared(source: str) -> tuple[str, ...]:
    """Requirements of a file. Raises InputError if its block is malformed or excludes this Python version."""
    declared = read_metadata(source)
    check_python(declared.requires_python)
    return tuple(check_requirement(text) for text in declared.dependencies)


def _check_archive(unpacked: UnpackedArchive, entry: str | None) -> None:
    """Raises InputError."""
    check_python(unpacked.requires_python)
    for text in unpacked.requirements:
        check_requirement(text)
    unpacked.locate(entry)
