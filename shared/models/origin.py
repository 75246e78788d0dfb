"""Start from another run's weights: `model.path: RUN@VERSION`, a run's folder and one of its checkpoints.

The new run copies config.json and tokenizer to its own folder, and the weights to its first checkpoint. After that the
other run may be deleted. `latest` is resolved once, to a version.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from shared.errors import ConfigError, DecodeError, Unavailable, WeightsError
from shared.run import checkpoint_files, saved
from shared.run.lineage import surviving
from shared.types import WeightVersion

LATEST = "latest"
CHECKPOINTS = "checkpoints"
ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """Version of another run.

    Attributes:
        folder: absolute path of the other run's folder.
        manifest: digest (blake3, hex) of the version's manifest.
    """

    run: str
    folder: str
    version: str
    manifest: str

    @property
    def path(self) -> str:
        """Write as `model.path`."""
        return f"{self.folder}@{self.version}"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / CHECKPOINTS / self.version


def find(path: str, kept: Path | None) -> Origin | None:
    """Find the version that `model.path` names; None if it names no run.

    `kept` is a folder with an origin.json, which is asked before the other run. Raises ConfigError if the run or the
    version does not exist, is not retained or cannot be read.
    """
    if "@" not in path or Path(path).is_dir():
        return None
    name, _, version = path.rpartition("@")
    folder = Path(name).absolute()
    if (
        kept is not None
        and (known := read(kept))
        and known.folder == str(folder)
        and version in (known.version, LATEST)
    ):
        return known
    return _found(folder, version, path)


def read(kept: Path) -> Origin | None:
    """Read the origin in that folder; None if it is missing or unreadable."""
    with suppress(OSError, ValueError, TypeError):
        found = Origin(**orjson.loads((kept / ORIGIN).read_bytes()))
        return found if all(isinstance(getattr(found, name), str) for name in Origin.__slots__) else None
    return None


def _found(folder: Path, version: str, path: str) -> Origin:
    root = folder / CHECKPOINTS
    there = surviving(checkpoint_files.versions(root))
    if not there:
        why = "has no checkpoint" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"model.path={path}: the run's folder {folder} {why}",
            "give RUN@VERSION, RUN the folder of a run that has trained",
        )
    wanted = there[-1] if version == LATEST else _parsed(version, path)
    if wanted not in there:
        retained = ", ".join(map(str, there))
        raise ConfigError(
            f"model.path={path}: {version} is not retained in {root}",
            f"retained are {retained}; or say {folder}@{LATEST}",
        )
    manifest = root / str(wanted) / checkpoint_files.MANIFEST
    try:
        saved.check(manifest.parent)
        return Origin(
            checkpoint_files.read_manifest(manifest).run, str(folder), str(wanted), checkpoint_files.digest(manifest)
        )
    except (WeightsError, Unavailable, OSError) as error:
        raise ConfigError(f"model.path={path} cannot be read: {error}", "choose another version of the run") from error


def _parsed(version: str, path: str) -> WeightVersion:
    try:
        return WeightVersion.parse(version)
    except DecodeError:
        raise ConfigError(
            f"model.path={path}: {version!r} is no version", f"versions look like e000001-s000020; or say {LATEST}"
        ) from None
