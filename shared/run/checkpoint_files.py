"""Checkpoint folders and their manifests: name, verify and find weights.

A folder `{root}/{version}/` is valid if and only if it holds `manifest.json`, which is written last: every file it
names is fsynced before, and the folder's own entry after. A reader that sees a manifest sees all of the weights.
Weights of kind `adapter` are adapters alone; their base lies once per run in `{root}/base/{digest}/`, and is durable
before the first manifest that names it.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import blake3
import orjson

from shared import codec
from shared.errors import DecodeError, Unavailable, VolleyError, WeightsError
from shared.files.reading import beneath, confined, open_file, read_file
from shared.files.storage import fsync
from shared.types import WeightVersion

SCHEMA = 1
MANIFEST, PARAMS = "manifest.json", "params"
BASE = "base"  # below the root: base weights of adapters, in a folder named by their digest
BAD = "bad"  # below the root: damaged checkpoints, each in a folder of its name
MAX_MANIFEST_BYTES = 16 * 2**20
_BLOCK_BYTES = 16 * 2**20
_MAX_DETAIL = 300
_DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EMEDIUMTYPE,
    errno.EFBIG,
    errno.EINVAL,
)


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """`name` is relative to the checkpoint folder; `size` in bytes; `blake3` in hex."""

    name: str
    size: int
    blake3: str

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """Parse a file's entry. Raises KeyError or TypeError."""
        return cls(text_of(raw, "name"), count_of(raw, "size"), text_of(raw, "blake3"))


@dataclass(frozen=True, slots=True)
class ManifestLeaf:
    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Full weights that adapters belong to; `digest` covers the files, in hex."""

    digest: str
    files: tuple[ManifestFile, ...]
    tree: tuple[ManifestLeaf, ...]

    @classmethod
    def of(cls, files: tuple[ManifestFile, ...], tree: tuple[ManifestLeaf, ...]) -> Self:
        return cls(_digest_of(files), files, tree)

    def folder(self, root: Path) -> Path:
        """Return the folder of the base; `root` holds the checkpoints."""
        return root / BASE / self.digest


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter part of a manifest; see `shared.models.adapter`."""

    rank: int
    alpha: float
    base: BaseWeights

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """Parse the adapter part. Raises KeyError or TypeError."""
        rank, alpha, base = count_of(raw, "rank"), float(raw["alpha"]), raw["base"]
        files = tuple(map(ManifestFile.from_mapping, base["files"]))
        if not rank or not math.isfinite(alpha) or base["digest"] != _digest_of(files):
            raise TypeError("rank, alpha or the digest of the base is invalid")
        return cls(rank, alpha, BaseWeights(base["digest"], files, tuple(map(leaf_of, base["tree"]))))


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed prompt and the trainer's log-probabilities of its tokens 1…n-1 given their prefix (natural log).

    They are those of the published parameters in float32. `noise` is the standard deviation of each in nats when the
    training dtype rounds; None if it was not measured.
    """

    input_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    noise: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a checkpoint.

    `path` is the Orbax folder, relative to the manifest's; `model` is the Hugging Face config.json of the architecture.
    `kind` is "full", or "adapter" with an `adapter`. `state` is the digest of the trainer's `state.json` beside it (see
    shared.run.state); None without one.
    """

    run: str
    version: str
    base_version: str | None
    step: int
    kind: str
    path: str
    files: tuple[ManifestFile, ...]
    tree: tuple[ManifestLeaf, ...]
    model: Mapping[str, Any]
    probe: Probe | None
    created: float
    state: str | None = None
    adapter: Adapter | None = None
    schema: int = SCHEMA

    @property
    def weight_version(self) -> WeightVersion:
        return WeightVersion.parse(self.version)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse a manifest. Raises WeightsError naming what is wrong."""
        try:
            raw = codec.from_record(data, "manifest")
            if raw["schema"] != SCHEMA:
                raise WeightsError(f"manifest has schema {raw['schema']!r:.50}, expected {SCHEMA}")
            base, probe, state, adapter = raw["base_version"], raw["probe"], raw.get("state"), raw.get("adapter")
            return cls(
                run=text_of(raw, "run"),
                version=str(WeightVersion.parse(text_of(raw, "version"))),
                base_version=None if base is None else str(WeightVersion.parse(text_of(raw, "base_version"))),
                step=count_of(raw, "step"),
                kind=text_of(raw, "kind"),
                path=text_of(raw, "path"),
                files=tuple(map(ManifestFile.from_mapping, raw["files"])),
                tree=tuple(leaf_of(leaf) for leaf in raw["tree"]),
                model=dict(raw["model"]),
                probe=None if probe is None else probe_of(probe),
                created=float(raw["created"]),
                state=None if state is None else text_of(raw, "state"),
                adapter=None if adapter is None else Adapter.from_mapping(adapter),
            )
        except (DecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise WeightsError(f"manifest is malformed: {error!r}"[:_MAX_DETAIL]) from error


def _digest_of(files: Sequence[ManifestFile]) -> str:
    """Return the blake3 of the files' names, sizes and digests, in hex."""
    return blake3.blake3(orjson.dumps([asdict(file) for file in files], option=orjson.OPT_SORT_KEYS)).hexdigest()


def text_of(raw: Mapping[str, Any], key: str) -> str:
    """Return a text value. Raises KeyError or TypeError, as the next three functions do."""
    value = raw[key]
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{key} is not text")
    return value


def count_of(raw: Mapping[str, Any], key: str) -> int:
    """Return an integer of at least 0."""
    value = raw[key]
    if type(value) is not int or value < 0:
        raise TypeError(f"{key} is not a count")
    return value


def leaf_of(raw: Mapping[str, Any]) -> ManifestLeaf:
    """Return an array's key, shape and dtype."""
    shape = tuple(raw["shape"])
    if any(type(n) is not int or n < 0 for n in shape):
        raise TypeError("a shape does not consist of sizes")
    return ManifestLeaf(text_of(raw, "key"), shape, text_of(raw, "dtype"))


def probe_of(raw: Mapping[str, Any]) -> Probe:
    """Return a probe. A non-finite log-probability is null in JSON, and is rejected."""
    ids, logprobs = tuple(raw["input_ids"]), tuple(raw["logprobs"])
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise TypeError("the probe's input_ids are not token ids")
    if len(ids) < 2 or len(logprobs) != len(ids) - 1 or any(type(p) is not float for p in logprobs):
        raise TypeError("the probe's logprobs are not one number for each id but the first")
    noise = None if raw["noise"] is None else tuple(raw["noise"])
    if noise is not None and (len(noise) != len(logprobs) or any(type(n) is not float or not n >= 0 for n in noise)):
        raise TypeError("the probe's noise is not a number of nats for each log-probability")
    return Probe(ids, logprobs, noise)


def digest_files(folder: Path, subfolder: str) -> tuple[ManifestFile, ...]:
    """Return size and digest of every file below `folder/subfolder`, by name, and fsync each."""
    files = sorted(p for p in (folder / subfolder).rglob("*") if p.is_file())
    return tuple(ManifestFile(str(p.relative_to(folder)), p.stat().st_size, digest(p, sync=True)) for p in files)


def seal(manifest: Manifest) -> str:
    """Return the blake3 of a manifest without its `state`, in hex.

    `state.json` holds this seal and the manifest holds the digest of `state.json`, so neither file changes without the
    other.
    """
    return blake3.blake3(orjson.dumps(_plain(replace(manifest, state=None)), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _plain(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as a dict; that of full weights has no key `adapter`."""
    plain = asdict(manifest)
    return plain if manifest.adapter else {name: value for name, value in plain.items() if name != "adapter"}


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Make the folder valid: write the manifest to a temporary name, fsync, rename, fsync the folder and its parent."""
    path, temporary = folder / MANIFEST, folder / f".{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(orjson.dumps(_plain(manifest), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync(folder)
    fsync(folder.parent)
    return path


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; `path` is the manifest or its folder.

    Raises WeightsError, and Unavailable if it cannot be read now.
    """
    path = path / MANIFEST if path.is_dir() else path
    try:
        return Manifest.from_json(read_file(path, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise unreadable(f"manifest {path}", error) from error


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check all files of the weights.

    Raises WeightsError naming the first file that is missing, extra, or has another size or digest, and Unavailable if
    the files cannot be read now.
    """
    try:
        _verify_files(folder, manifest)
    except OSError as error:
        raise unreadable(f"{manifest.version}: {error.filename}", error) from error


def verify_base(root: Path, base: BaseWeights) -> None:
    """Check the files of a base below `root`, as `verify_files` does."""
    try:
        for file, path in _present(base.folder(root), PARAMS, base.files, f"base {base.digest}"):
            _agree(file, digest(path, most=file.size), f"base {base.digest}")
    except OSError as error:
        raise unreadable(f"base {base.digest}: {error.filename}", error) from error


def copy_files(
    folder: Path, below: str, files: Sequence[ManifestFile], version: str, copy: Callable[[str], IO[bytes]]
) -> None:
    """Verify the checkpoint's files as `verify_files` does, while copying them to what `copy` opens for their names.

    Each file is read once, and its digest is that of the bytes written: the copies hold what was verified, even if the
    file changes meanwhile. Memory use is 16 MiB.

    Raises as `verify_files`; then the copies are unusable. Exceptions of `copy` pass through, except OSError.
    """
    try:
        for file, path in _present(folder, below, files, version):
            _agree(file, digest(path, copy=copy(file.name), most=file.size), version)
    except OSError as error:
        raise unreadable(f"{version}: {error.filename}", error) from error


def unreadable(what: str, error: OSError) -> VolleyError:
    """Translate the error of a checkpoint's file: WeightsError if it is missing or not a file, else Unavailable.

    Too many open files, or a file server that is away, say nothing about the file: a later read may succeed.
    """
    if error.errno in _DAMAGE:
        return WeightsError(f"{what}: {error.strerror}", "the checkpoint may just have been removed")
    return Unavailable(f"{what} cannot be read now: {error.strerror}")


def _verify_files(folder: Path, manifest: Manifest) -> None:
    for file, path in _present(folder, manifest.path, manifest.files, manifest.version):
        _agree(file, digest(path, most=file.size), manifest.version)


def _present(
    folder: Path, below: str, files: Sequence[ManifestFile], version: str
) -> Iterator[tuple[ManifestFile, Path]]:
    """Yield every file with its path, after checking that none is missing, extra or of another size."""
    expected = {file.name for file in files}
    if len(expected) != len(files):
        raise WeightsError(f"{version}: its manifest names a file twice")
    root = folder.resolve()
    entries = (path / name for path, _, names in confined(folder, below).walk(on_error=_raise) for name in names)
    present = {str(p.relative_to(root)) for p in entries}
    for name in sorted(present ^ expected):
        raise WeightsError(f"{version}: file {name} is {'not in the manifest' if name in present else 'missing'}")
    for file in files:
        path = beneath(root, file.name)
        if (size := path.stat().st_size) != file.size:
            raise WeightsError(f"{version}: file {file.name} has {size} bytes, expected {file.size}")
        yield file, path


def _agree(file: ManifestFile, found: str, version: str) -> None:
    if found != file.blake3:
        raise WeightsError(f"{version}: digest of {file.name} differs")


def _raise(error: OSError) -> None:
    raise error


def versions(root: Path) -> list[WeightVersion]:
    """Return the versions with a manifest under `root`, oldest first; none if `root` is missing."""
    names = (entry.parent.name for entry in root.glob(f"*/{MANIFEST}"))
    return sorted(version for version in map(WeightVersion.of_name, names) if version is not None)


def newest(root: Path) -> Path | None:
    """Return the folder of the newest version under `root` that has a manifest."""
    found = versions(root)
    return root / str(found[-1]) if found else None


def digest(path: Path, sync: bool = False, copy: IO[bytes] | None = None, most: int | None = None) -> str:
    """Return the blake3 of a file in hex; with `sync`, fsync it first; with `copy`, write its bytes there.

    Raises WeightsError if the file has more than `most` bytes: it grew after its size was read.
    """
    if sync:
        fsync(path)
    found = blake3.blake3(max_threads=blake3.blake3.AUTO)
    known = _digests.get() if copy is None else None
    with open_file(path) as file:  # not mmap: a file truncated meanwhile would kill the process
        status = os.fstat(file.fileno())
        size, key = status.st_size, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if known is not None and key in known and (most is None or size <= most):
            return known[key]
        block = memoryview(bytearray(min(_BLOCK_BYTES, size + 1)))
        n_read = 0
        while n := os.readv(file.fileno(), [block]):
            n_read += n
            if most is not None and n_read > most:
                raise WeightsError(f"{path.name} grew while it was read")
            found.update(block[:n])
            if copy is not None:
                copy.write(block[:n])
    if known is not None and n_read == size:
        known[key] = found.hexdigest()
    return found.hexdigest()


_digests: ContextVar[dict[tuple[int, int, int, int], str] | None] = ContextVar("digests", default=None)


@contextmanager
def hashing_once() -> Iterator[None]:
    """Read each file once inside this context, even if it has several names or is requested again."""
    token = _digests.set({})
    try:
        yield
    finally:
        _digests.reset(token)
