"""Storage of submitted environments: a folder for each name, and in it one for each version.

    NAME/NUMBER/record.json     the version's state and history, replaced whole
    NAME/NUMBER/source/         the submitted files, never changed
    NAME/NUMBER/failures.log    failures of its recent episodes, one a line

Invariants: a version exists whole or not at all (its folder is renamed into place last), and is durable before the
request is answered. Blocks on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from shared.files import storage
from shared.process import telemetry
from volley_sandbox.submissions.record import SubmittedVersion

_RECORD, _SOURCE, _FAILURES = "record.json", "source", "failures.log"
_log = telemetry.Log("submissions")


class SubmissionStore:
    """Versions on disk. `folder` is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> list[SubmittedVersion]:
        """Load all versions, by name and number. Unreadable ones are logged and left in place."""
        return [record for path in sorted(self._versions()) if (record := _read(path / _RECORD)) is not None]

    def source(self, version: SubmittedVersion) -> Path:
        """Folder of the submitted files."""
        return self._path(version) / _SOURCE

    def newest(self, name: str) -> int:
        """Highest number of any version of this name, readable or not; 0 if there is none."""
        return max((int(path.name) for path in self._versions() if path.parent.name == name), default=0)

    def add(self, version: SubmittedVersion, files: Mapping[str, bytes]) -> None:
        """Store a new version.

        Args:
            files: content by path in the source folder.

        Raises StorageUnavailable.
        """
        path = self._path(version)
        with storage.storage(self.folder.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}")
        with storage.storage(path.parent):
            shutil.rmtree(made, ignore_errors=True)
            (made / _SOURCE).mkdir(parents=True)
            for name, content in files.items():
                file = made / _SOURCE / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                storage.fsync(file)
            (made / _RECORD).write_text(version.model_dump_json(indent=1), encoding="utf-8")
            storage.fsync(made / _RECORD)
            storage.fsync(made)
            os.rename(made, path)
            storage.fsync(path.parent)
            storage.fsync(path.parent.parent)

    def update(self, version: SubmittedVersion) -> None:
        """Replace the record. On StorageUnavailable it is unchanged."""
        storage.replace(self._path(version) / _RECORD, version.model_dump_json(indent=1).encode())

    def failures(self, version: SubmittedVersion) -> list[str]:
        """Lines of the last `keep_failures`; none if they cannot be read."""
        try:
            return (self._path(version) / _FAILURES).read_text("utf-8", "replace").splitlines()
        except OSError:
            return []

    def keep_failures(self, version: SubmittedVersion, lines: Sequence[str]) -> None:
        """Replace the lines. Raises StorageUnavailable."""
        storage.replace(self._path(version) / _FAILURES, "".join(f"{line}\n" for line in lines).encode())

    def _path(self, version: SubmittedVersion) -> Path:
        return self.folder / version.name / str(version.version)

    def _versions(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("*/*") if path.name.isdecimal() and path.is_dir())


def _read(path: Path) -> SubmittedVersion | None:
    try:
        record = SubmittedVersion.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        _log.error("a submitted environment cannot be read", file=str(path), reason=str(error))
        return None
    if (record.name, str(record.version)) != (path.parent.parent.name, path.parent.name):
        _log.error("record of a submitted environment names another version than its folder", file=str(path))
        return None
    return record
