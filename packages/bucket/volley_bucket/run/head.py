"""`head.json` of a run's bucket: the bucket's owner and contents.

    head.json                               replaced by a conditional put, after all that it names is uploaded
    checkpoints/e000002-s000042/…           as in the run's folder, manifest.json last; checkpoints/base/DIGEST/…
    archive/e000002/s000042.zst, .json      groups and commit records, as in the run's folder
    refused/e000002/s000042-1.zst           groups of refused steps, likewise
    lines/e000002/DIGEST                    a piece of a file of lines, by the epoch that uploaded it

Invariants: the first head is the first object at an address, and the bucket accepts it only if there is none. All that
a head names is uploaded before it, and removed only once a later head that does not name it has replaced it. A lost
head is followed by one that names all that the folder has; nothing is removed meanwhile. A head belongs to one folder;
only a trainer that has restored its own empty folder from the bucket transfers the head to that folder. Within a folder
epochs ascend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from shared import codec
from shared.errors import ConfigError, Conflict, DecodeError, NotFound, WeightsError
from shared.run.checkpoint_files import text_of
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.state import parse_lineage
from shared.types import Lineage, WeightVersion
from volley_bucket.objects import Bucket, Tag
from volley_bucket.run.identity import FolderIdentity

HEAD = "head.json"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
MAX_PIECE_BYTES = 64 * 2**20
_DIGEST, _ID = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{16}")
_MOST_VALUES = 2**20
_MOST_INCARNATIONS, _MOST_PIECES, _MOST_REFUSED, _MOST_CHECKPOINTS = 50_000, 4096, 50_000, 8
MOST_EPOCHS = 2**30
"""Highest epoch that a restore accepts; each start takes the next one."""
_MOST, _MAX_DETAIL = 2**31, 300


@dataclass(frozen=True, slots=True)
class Piece:
    """Leading lines of a file: their size in bytes, their blake3 in hex, and the epoch that uploaded them."""

    epoch: int
    blake3: str
    size: int

    @property
    def key(self) -> str:
        return f"lines/e{self.epoch:06d}/{self.blake3}"


@dataclass(frozen=True, slots=True)
class BucketHead:
    """The bucket's owner and contents.

    `folder` is the drawn name of the run's folder that the bucket copies, `beginning` the run's identifier.
    `epoch` is the incarnation that wrote this head (0 before the first one), `epochs` are all that the folder has seen.

    `version` is the newest step in the bucket, None before the first; the bucket has the log from the first step of its
    `lineage` on. `checkpoints` are names and manifest digests (blake3, in hex): first the reference, if any, then those
    to resume from, oldest first. `lines` are the pieces of each file of lines, in order. `refused` counts the refusals
    of each version.
    """

    run: str
    folder: str
    beginning: str
    epoch: int
    epochs: tuple[int, ...]
    version: WeightVersion | None = None
    lineage: Lineage = ()
    checkpoints: tuple[tuple[str, str], ...] = ()
    lines: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    refused: tuple[tuple[str, int], ...] = ()

    def has(self, version: WeightVersion) -> bool:
        """True if the log of that step is in the bucket."""
        return self.version is not None and version.step <= self.version.step and in_lineage(version, self.lineage)

    def names(self) -> set[str]:
        """Folders of the checkpoints and keys of the pieces."""
        pieces = {piece.key for pieces in self.lines.values() for piece in pieces}
        return pieces | {f"checkpoints/{name}" for name, _ in self.checkpoints}

    def to_json(self) -> bytes:
        plain = asdict(self) | {
            "schema": SCHEMA,
            "version": None if self.version is None else str(self.version),
            "lines": {name: [astuple(piece) for piece in pieces] for name, pieces in self.lines.items()},
        }
        return orjson.dumps(plain)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse an untrusted head. Raises WeightsError if no trainer can have written it."""
        try:
            raw = codec.from_json(data, HEAD, _MOST_VALUES)
            if raw["schema"] != SCHEMA or raw["lines"].keys() - files_of_lines(RunFolder(Path())).keys():
                raise WeightsError(f"it is not a head of schema {SCHEMA}")
            version = None if raw["version"] is None else WeightVersion.parse(_version(raw["version"]))
            lines = {name: tuple(map(_piece, _most(of, _MOST_PIECES))) for name, of in raw["lines"].items()}
            head = cls(
                run=text_of(raw, "run"),
                folder=_matching(_ID, raw["folder"]),
                beginning=_matching(_ID, raw["beginning"]),
                epoch=_number(raw["epoch"], 0, _MOST),
                epochs=tuple(map(_epoch, _most(raw["epochs"], _MOST_INCARNATIONS))),
                version=version,
                lineage=parse_lineage(_most(raw["lineage"], _MOST_INCARNATIONS)),
                checkpoints=tuple(map(_checkpoint, _most(raw["checkpoints"], _MOST_CHECKPOINTS))),
                lines=lines,
                refused=tuple(map(_refused, _most(raw["refused"], _MOST_REFUSED))),
            )
        except (AttributeError, KeyError, TypeError, ValueError, DecodeError) as error:
            raise WeightsError(f"{HEAD} is malformed: {error!r}"[:_MAX_DETAIL]) from error
        if list(head.epochs) != sorted({*head.epochs}):
            raise WeightsError(f"the epochs of {HEAD} do not ascend")
        if not {epoch for epoch, _ in head.lineage} <= {*head.epochs} or head.epoch > max(
            head.epochs, default=head.epoch
        ):
            raise WeightsError(f"{HEAD} names an epoch that its folder has not seen")
        if version is not None and not (in_lineage(version, head.lineage) and head.checkpoints):
            raise WeightsError(f"{HEAD} names a version outside its lineage, or no checkpoint")
        return head


def find_head(bucket: Bucket, run: str, identity: FolderIdentity | None) -> tuple[BucketHead | None, Tag | None]:
    """Read the head and its tag; the head is None in an empty bucket.

    In a bucket that this folder owns, a lost or truncated head is None too, with the tag of the truncated one.

    Raises ConfigError if the bucket is another run's or has no valid head, and as `Bucket`.
    """
    is_ours, tag = identity is not None and bucket.address in identity.owns, None
    try:
        data, tag = bucket.read_tagged(HEAD, MAX_BYTES)
        head = BucketHead.from_json(data)
    except NotFound:
        is_empty = bucket.is_empty()  # raises NotFound again if there is no bucket at all
        if not is_empty and not is_ours:
            raise ConfigError(
                f"{bucket.address} is not empty, and belongs to no run: it has no {HEAD}",
                "choose another run.bucket, or empty this one",
            ) from None
        return None, None
    except WeightsError as error:
        if is_ours:
            return None, tag
        raise ConfigError(f"{bucket.address}: {error}", "choose another run.bucket") from error
    if head.run != run:
        raise ConfigError(
            f"{bucket.address} belongs to run {head.run[:100]}, not to {run}", "choose another run.bucket, or run.name"
        )
    return head, tag


def put_head(bucket: Bucket, head: BucketHead, tag: Tag | None) -> Tag:
    """Replace the head with `Bucket.swap`; return its tag.

    If the bucket already has this head, an earlier request succeeded and its response was lost. Raises WeightsError for
    a head that `find_head` would reject.
    """
    data = head.to_json()
    if len(data) > MAX_BYTES:
        raise WeightsError(f"{HEAD} has {len(data)} bytes, more than {MAX_BYTES}")
    BucketHead.from_json(data)
    try:
        return bucket.swap(HEAD, data, tag)
    except Conflict:
        with suppress(NotFound, WeightsError):
            found, there = bucket.read_tagged(HEAD, MAX_BYTES)
            if found == data:
                return there
        raise


def other_folder(bucket: Bucket, head: BucketHead) -> ConfigError:
    return ConfigError(
        f"{bucket.address} has continued from another folder of run {head.run}, up to {head.version}",
        "to resume from the bucket, move this folder away: an empty folder is restored; or choose another run.bucket",
    )


def files_of_lines(folder: RunFolder) -> dict[str, Path]:
    """Files of lines in a trainer's folder, by name.

    The ledger is first, so files that its lines refer to are read after it.
    """
    own = folder.ledger, folder.metrics, folder.handovers, folder.refused, folder.sft
    return {path.name: path for path in (*own, *folder.handed_over.values())}


def _most(values: Any, n: int) -> list[Any]:
    if not isinstance(values, list) or len(values) > n:
        raise TypeError(f"a value is not a list of at most {n} values")
    return values


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:50]} is not a number from {least} to {most}")
    return value


def _epoch(value: Any) -> int:
    return _number(value, 1, _MOST)


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:50]!r} is not hexadecimal")
    return value


def _version(value: Any) -> str:
    version = WeightVersion.parse(value)
    _number(version.epoch, 1, _MOST), _number(version.step, 0, _MOST)
    return str(version)


def _piece(value: Any) -> Piece:
    epoch, digest, size = value
    return Piece(_epoch(epoch), _matching(_DIGEST, digest), _number(size, 1, MAX_PIECE_BYTES))


def _checkpoint(value: Any) -> tuple[str, str]:
    name, digest = value
    return _version(name), _matching(_DIGEST, digest)


def _refused(value: Any) -> tuple[str, int]:
    name, n = value
    return _version(name), _number(n, 1, _MOST_REFUSED)
