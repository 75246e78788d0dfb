"""Checkpoint folders and their manifests: how weights are named, proven whole, and found.

A folder `{root}/{version}/` is valid if and only if it holds `manifest.json`, which is written last: every file it names
has been fsynced before, and the folder's own entry after. A reader that sees a manifest sees all of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import blake3
import orjson

from shared.errors import DecodeError, Forbidden, WeightsError
from shared.types import WeightVersion

SCHEMA = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class File:
    """`name` is relative to the checkpoint folder; `size` in bytes; `blake3` in hex."""

    name: str
    size: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Leaf:
    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed prompt and the trainer's log-probabilities of its tokens 1…n-1 given their prefix (natural log)."""

    input_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`path` is the Orbax folder, relative to the manifest's; `model` is the Hugging Face config.json of the architecture.

    `state` is the digest of a trainer's `state.json` beside it (see shared.state); None where there is none.
    """

    run: str
    version: str
    base_version: str | None
    step: int
    kind: str
    path: str
    files: tuple[File, ...]
    tree: tuple[Leaf, ...]
    model: Mapping[str, Any]
    probe: Probe | None
    created: float
    state: str | None = None
    schema: int = SCHEMA

    @property
    def weight_version(self) -> WeightVersion:
        return WeightVersion.parse(self.version)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises WeightsError naming what is wrong."""
        try:
            raw = orjson.loads(data)
            if raw["schema"] != SCHEMA:
                raise WeightsError(f"manifest has schema {raw['schema']}, expected {SCHEMA}")
            probe = raw["probe"]
            return cls(
                run=str(raw["run"]),
                version=str(WeightVersion.parse(raw["version"])),
                base_version=raw["base_version"],
                step=int(raw["step"]),
                kind=str(raw["kind"]),
                path=str(raw["path"]),
                files=tuple(File(str(f["name"]), int(f["size"]), str(f["blake3"])) for f in raw["files"]),
                tree=tuple(Leaf(str(x["key"]), tuple(int(n) for n in x["shape"]), str(x["dtype"])) for x in raw["tree"]),
                model=dict(raw["model"]),
                probe=Probe(tuple(probe["input_ids"]), tuple(probe["logprobs"])) if probe else None,
                created=float(raw["created"]),
                state=raw.get("state"),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"manifest is malformed: {error!r}") from error


def digest_files(folder: Path, subfolder: str) -> tuple[File, ...]:
    """Size and digest of every file below `folder/subfolder`, by name; each is fsynced on the way."""
    files = sorted(p for p in (folder / subfolder).rglob("*") if p.is_file())
    return tuple(File(str(p.relative_to(folder)), p.stat().st_size, digest(p, sync=True)) for p in files)


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Makes the folder valid: writes the manifest beside its place, fsyncs, renames, fsyncs the folder and its parent."""
    path, temporary = folder / MANIFEST, folder / f".{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(orjson.dumps(asdict(manifest), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync(folder)
    fsync(folder.parent)
    return path


def read_manifest(path: Path) -> Manifest:
    """`path` is a manifest or its folder. Raises WeightsError."""
    path = path / MANIFEST if path.is_dir() else path
    try:
        return Manifest.from_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"manifest {path}: {error.strerror}") from error


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Raises WeightsError naming the first file that is missing, extra, of another size, or of another digest."""
    expected = {file.name: file for file in manifest.files}
    below = confined(folder, manifest.path)
    present = {str(p.relative_to(folder.resolve())) for p in below.rglob("*") if p.is_file()}
    for name in sorted(present ^ expected.keys()):
        raise WeightsError(f"{manifest.version}: file {name} is {'not in the manifest' if name in present else 'missing'}")
    for file in manifest.files:
        path = confined(folder, file.name)
        if path.stat().st_size != file.size:
            raise WeightsError(f"{manifest.version}: file {file.name} has {path.stat().st_size} bytes, expected {file.size}")
        if digest(path) != file.blake3:
            raise WeightsError(f"{manifest.version}: digest of {file.name} differs")


def confined(root: Path, name: str | Path) -> Path:
    """`name` resolved beneath `root`. Raises Forbidden if it leads outside, also through a link."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise Forbidden(f"path {name} lies outside {root}")
    return path


def versions(root: Path) -> list[WeightVersion]:
    """Versions with a manifest under `root`, oldest first; a missing root has none."""
    names = (entry.parent.name for entry in root.glob(f"*/{MANIFEST}"))
    return sorted(version for version in map(_parse_or_none, names) if version is not None)


def newest(root: Path) -> Path | None:
    """Folder of the newest version under `root` that has a manifest."""
    found = versions(root)
    return root / str(found[-1]) if found else None


def fsync(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path, sync: bool = False) -> str:
    """blake3 of a file in hex; with `sync` its bytes are durable before."""
    if sync:
        fsync(path)
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


def _parse_or_none(name: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(name)
    except DecodeError:
        return None
