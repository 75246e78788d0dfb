"""Another run's weights to start from: `model.path: RUN@VERSION`, where RUN is a run's folder and VERSION one of its
checkpoints.

What the run then needs of the other one's model, config.json and tokenizer, is kept in its own folder, and the weights
are in its own first checkpoint: from then on the other run may be deleted. `latest` is resolved once, and the version
is what counts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from shared.errors import ConfigError, DecodeError, Unavailable, WeightsError
from shared.run import checkpoint_files, saved
from shared.run import state as states
from shared.types import WeightVersion

LATEST = "latest"
CHECKPOINTS = "checkpoints"
ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """`folder` is the other run's, absolute; `manifest` is the digest (blake3, hex) of the manifest of its
    `version`.
    """

    run: str
    folder: str
    version: str
    manifest: str

    @property
    def path(self) -> str:
        """As `model.path`."""
        return f"{self.folder}@{self.version}"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / CHECKPOINTS / self.version


def find(path: str, kept: Path | None) -> Origin | None:
    """What `model.path` names, as `kept` (a folder with an origin.json) tells, else the other run; None if it names no
    run.

    Raises ConfigError: no such run, no such version, a version that is not retained or cannot be read.
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
    """The origin that is kept there; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        found = Origin(**orjson.loads((kept / ORIGIN).read_bytes()))
        return found if all(isinstance(getattr(found, name), str) for name in Origin.__slots__) else None
    return None


def _found(folder: Path, version: str, path: str) -> Origin:
    root = folder / CHECKPOINTS
    there = states.surviving(checkpoint_files.versions(root))
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
