"""What the sandboxes of a version run: its file or its archive, unpacked, with the dependencies that it declares.

Made when it is first needed, from what is on disk: a service that starts again needs no network for what it has had
before. No code of a submission runs here (see sandbox.packages).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.env.sandbox.limits import EnvironmentProgram
from services.env.sandbox.packages.archives import UnpackedArchive, unpack
from services.env.sandbox.packages.dependencies import (
    DependencyStore,
    check_python,
    check_requirement,
    read_metadata,
)
from services.env.submissions.record import SubmittedVersion
from services.env.submissions.store import SubmissionStore
from services.env.submissions.submission import Submission, check_size
from shared.errors import InputError, StorageDenied

MAIN, ARCHIVE = "environment.py", "environment.zip"


class Programs:
    """Args: folder: where archives are unpacked and dependencies installed; index: the only package index."""

    def __init__(self, store: SubmissionStore, folder: Path, index: str) -> None:
        self._store, self._unpacked = store, folder / "unpacked"
        self._dependencies = DependencyStore(folder / "packages", index)
        self._made: dict[str, EnvironmentProgram] = {}

    async def check(self, wanted: Submission) -> Mapping[str, bytes]:
        """The files to keep of what was sent. Raises InputError, DecodeError, TooLarge naming what is wrong with it."""
        content = wanted.content
        check_size(content, archive=wanted.archive)
        if wanted.archive:
            _check_archive(await asyncio.to_thread(unpack, content, self._unpacked), wanted.entry)
            return {ARCHIVE: content}
        _check_declared(content.decode("utf-8-sig"))
        return {MAIN: content}

    async def of(self, version: SubmittedVersion) -> EnvironmentProgram:
        """Raises InputError (what cannot be installed), Unavailable (no index), StorageDenied (its files are gone)."""
        made = self._made.get(version.full_name)
        if made is None:
            made = self._made[version.full_name] = await self._make(version)
        return made

    async def _make(self, version: SubmittedVersion) -> EnvironmentProgram:
        path = self._store.source(version) / (ARCHIVE if version.archive else MAIN)
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise StorageDenied(f"the source of {version.full_name} cannot be read: {error}") from error
        if version.archive:
            return await self._of_archive(content, version)
        return await of_source(
            content.decode("utf-8-sig"), f"{version.name}.py", version.entry, version.config, self._dependencies
        )

    async def _of_archive(self, content: bytes, version: SubmittedVersion) -> EnvironmentProgram:
        unpacked = await asyncio.to_thread(unpack, content, self._unpacked)
        module, entry = unpacked.locate(version.entry)
        installed = await self._dependencies.install(unpacked.requirements)
        folders = (unpacked.folder, *installed)
        return EnvironmentProgram(None, module, entry, version.config, module=module, folders=folders)


async def of_source(
    source: str, filename: str, entry: str | None, config: Mapping[str, Any], dependencies: DependencyStore
) -> EnvironmentProgram:
    """The program of one file. Raises InputError, TooLarge, Unavailable."""
    folders = await dependencies.install(_check_declared(source))
    return EnvironmentProgram(source, filename, entry, config, folders=folders)


def _check_declared(source: str) -> tuple[str, ...]:
    """The requirements of a file. Raises InputError where its block is malformed, or it does not run on this Python."""
    declared = read_metadata(source)
    check_python(declared.requires_python)
    return tuple(check_requirement(text) for text in declared.dependencies)


def _check_archive(unpacked: UnpackedArchive, entry: str | None) -> None:
    """Raises InputError."""
    for top in (unpacked.folder, *(path for path in unpacked.folder.iterdir() if path.is_dir())):
        if (top / "task.toml").is_file() and (top / "instruction.md").is_file():
            raise InputError(
                "this is a task folder of Harbor, which is played in a container image of its own and judged by a"
                " program in it; a sandbox has no image and starts no programs",
                "run it where containers are, behind a server that speaks a protocol of POST /environments {url}",
            )
    check_python(unpacked.requires_python)
    for text in unpacked.requirements:
        check_requirement(text)
    unpacked.locate(entry)
