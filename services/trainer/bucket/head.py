"""`head.json` of a run's bucket: whose it is, and what of the run is in it.

    head.json                               replaced by a conditional put, after all that it names is there
    checkpoints/e000002-s000042/…           as in the run's folder, manifest.json last; checkpoints/base/DIGEST/…
    archive/e000002/s000042.zst, .json      groups and commit records, as in the run's folder
    refused/e000002/s000042-1.zst           groups of refused steps, likewise
    lines/e000002/DIGEST                    a piece of a file of lines, by the epoch that put it

Invariants: nothing is put below an address before its first head is, which the bucket takes only where none is; what a
head names is there, and is removed only once a later head, which does not name it, is in its place; one that was lost
is followed by a head of all that the folder has, and nothing is removed meanwhile. A head belongs to one folder:
another one is given it only by a trainer that has filled its own, empty, from it. In one folder epochs ascend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from services.trainer.bucket.identity import FolderIdentity
from shared import codec
from shared.errors import ConfigError, Conflict, DecodeError, NotFound, WeightsError
from shared.files.buckets import Bucket, Tag
from shared.run.checkpoint_files import text_of
from shared.run.folder import RunFolder
from shared.run.state import in_lineage, parse_lineage
from shared.types import Lineage, WeightVersion

HEAD = "head.json"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
MAX_PIECE_BYTES = 64 * 2**20
_DIGEST, _ID = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{16}")
_MOST_VALUES = 2**20
_MOST_INCARNATIONS, _MOST_PIECES, _MOST_REFUSED, _MOST_CHECKPOINTS = 50_000, 4096, 50_000, 8
MOST_EPOCHS = 2**30
"""No trainer is given a higher epoch by a bucket; each start has one more."""
_MOST, _MAX_DETAIL = 2**31, 300


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines of a file: `size` bytes of that blake3, in hex, put by `epoch`."""

    epoch: int
    blake3: str
    size: int

    @property
    def key(self) -> str:
        return f"lines/e{self.epoch:06d}/{self.blake3}"


@dataclass(frozen=True, slots=True)
class BucketHead:
    """`folder` is the name that the folder was given which the bucket follows, `beginning` that of the run's beginning,
    `epoch` the incarnation that put this (0 before the first one), `epochs` all that the folder has seen.

    `version` is the newest step that the bucket has, None before there is any; the log is there from the first step of
    its `lineage` on. `checkpoints` are names and digests (blake3, in hex) of the manifests of those to go on from,
    oldest first, and before them that of the reference; `lines` are the pieces of each file of lines, in order;
    `refused` says how often each version was refused.
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
        """Whether the log of that step is in the bucket."""
        return self.version is not None and version.step <= self.version.step and in_lineage(version, self.lineage)

    def names(self) -> set[str]:
        """Of the checkpoints and pieces, as folders and keys."""
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
        """Raises WeightsError for what no trainer has put there: names and numbers may be anybody's."""
        try:
            raw = codec.from_json(data, HEAD, _MOST_VALUES)
            if raw["schema"] != SCHEMA or raw["lines"].keys() - files_of_lines(RunFolder(Path())).keys():
                raise WeightsError(f"it is no head of schema {SCHEMA}")
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
            raise WeightsError(f"{HEAD} names a version that is not of its lineage, or no checkpoint")
        return head


def find_head(bucket: Bucket, run: str, identity: FolderIdentity | None) -> tuple[BucketHead | None, Tag | None]:
    """None where there is none in an empty bucket; in one that this folder owns also where it was lost, or is cut, then
    with the tag of what is left of it.

    Raises ConfigError if it is another run's, or no head, and as `Bucket`.
    """
    is_ours, tag = identity is not None and bucket.address in identity.owns, None
    try:
        data, tag = bucket.read_tagged(HEAD, MAX_BYTES)
        head = BucketHead.from_json(data)
    except NotFound:
        is_empty = bucket.is_empty()  # raises it again where there is no bucket at all
        if not is_empty and not is_ours:
            raise ConfigError(
                f"{bucket.address} is not empty, and no run's: it has no {HEAD}",
                "choose another run.bucket, or empty it",
            ) from None
        return None, None
    except WeightsError as error:
        if is_ours:
            return None, tag
        raise ConfigError(f"{bucket.address}: {error}", "choose another run.bucket") from error
    if head.run != run:
        raise ConfigError(
            f"{bucket.address} is that of run {head.run[:100]}, not of {run}", "choose another run.bucket, or run.name"
        )
    return head, tag


def put_head(bucket: Bucket, head: BucketHead, tag: Tag | None) -> Tag:
    """`Bucket.swap` of a head that nobody else puts: one that is there already is ours, and its answer was lost.
    Raises WeightsError for one that no reader takes.
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
        f"{bucket.address} has gone on from another folder of run {head.run}, up to {head.version}",
        "to go on from there, move this folder away: an empty one is filled; or choose another run.bucket",
    )


def files_of_lines(folder: RunFolder) -> dict[str, Path]:
    """By name, those that a trainer's folder has. The ledger comes first: what its lines rest on is read after it."""
    own = folder.ledger, folder.metrics, folder.handovers, folder.refused, folder.sft
    return {path.name: path for path in (*own, *folder.handed_over.values())}


def _most(values: Any, n: int) -> list[Any]:
    if not isinstance(values, list) or len(values) > n:
        raise TypeError(f"a list is none, or has more than {n} values")
    return values


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:50]} is no number from {least} to {most}")
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
