"""Published version: a manifest of content-addressed chunks, itself addressed by its content.

The arrays of a version form a stream, row-major and little-endian, in the order of its leaves; the stream is cut into
chunks. A large array starts a chunk, so that it consists of whole ones; small arrays share chunks. Two versions of one
model are cut alike. Names are the trainer's own (shared.models.names translates them to Hugging Face's): a checkpoint
has the same tree, adapters keep their names, and no array is transposed on its way.

`digest` identifies the weights: it follows from names, shapes, dtypes and bytes, not from the version's name. The
blake3 of the manifest's JSON identifies the publication; with it, manifest and chunks may come from any source.

`deltas` are another way to get a chunk: from one of an earlier version, which may itself be made that way. Every chunk
is also available whole, so a server that missed many versions, or has just started, needs no earlier version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import blake3
import orjson

from shared import codec
from shared.errors import DecodeError, InputError, WeightsError
from shared.run.checkpoint_files import ManifestLeaf, Probe, count_of, leaf_of, probe_of, text_of
from shared.types import WeightVersion

SCHEMA = 1
CHUNK_BYTES = 8 * 2**20
MAX_MANIFEST_BYTES = 2**25
MAX_SOURCES = 64
MAX_WAY = 64
_MAX_VALUES = 2**21
_MAX_DETAIL = 300
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ADDRESS = re.compile(
    rf"https?://({_LABEL}(\.{_LABEL}){{0,20}}|\[[0-9A-Fa-f:.]{{2,45}}\])(:\d{{1,5}})?(/[^\s?#]{{0,200}})?"
)
_DIGEST_CHARACTERS = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`blake3` in hex, `size` in bytes."""

    blake3: str
    size: int

    @classmethod
    def from_list(cls, raw: Any) -> Self:
        """Parse a chunk. Raises TypeError or ValueError."""
        digest, size = raw
        if not is_digest(digest) or type(size) is not int or not 0 < size <= CHUNK_BYTES:
            raise TypeError("a chunk must be a digest with a size")
        return cls(digest, size)


@dataclass(frozen=True, slots=True)
class Delta:
    """Difference that makes a chunk from the chunk `base` (see `shared.published.delta`), itself sent as a chunk."""

    base: str
    chunk: Chunk

    @classmethod
    def from_list(cls, raw: Any) -> Self:
        """Parse a delta. Raises TypeError or ValueError."""
        base, *chunk = raw
        if not is_digest(base):
            raise TypeError("the base of a delta is not a digest")
        return cls(base, Chunk.from_list(chunk))


@dataclass(frozen=True)
class WeightTree:
    """Arrays and their chunks, both in the order of the stream."""

    leaves: tuple[ManifestLeaf, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def digest(self) -> str:
        """Return the blake3 of names, shapes, dtypes and chunks, in hex."""
        return blake3.blake3(orjson.dumps(self.to_json())).hexdigest()

    @property
    def n_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def to_json(self) -> dict[str, Any]:
        leaves = [{"key": leaf.key, "shape": leaf.shape, "dtype": leaf.dtype} for leaf in self.leaves]
        return {"leaves": leaves, "chunks": [[chunk.blake3, chunk.size] for chunk in self.chunks]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Parse a tree. Raises KeyError, TypeError or ValueError."""
        tree = cls(tuple(map(leaf_of, raw["leaves"])), tuple(map(Chunk.from_list, raw["chunks"])))
        if sum(map(leaf_bytes, tree.leaves)) != tree.n_bytes:
            raise ValueError("chunks and arrays differ in size")
        if len({leaf.key for leaf in tree.leaves}) != len(tree.leaves) or not tree.leaves:
            raise ValueError("no arrays, or two with one name")
        return tree


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """Adapter settings: the weights beside it are adapters of `base`; see `shared.models.adapter`."""

    rank: int
    alpha: float
    base: WeightTree

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Parse the adapter settings. Raises KeyError, TypeError or ValueError."""
        rank, alpha = count_of(raw, "rank"), float(raw["alpha"])
        if not rank or not math.isfinite(alpha):
            raise ValueError("rank or alpha is invalid")
        return cls(rank, alpha, WeightTree.from_json(raw["base"]))


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """Manifest of a version of a run's weights.

    `run_id` identifies the run; one that was restarted in an emptied folder has another. `model` is the Hugging Face
    config.json of the architecture; `created` is in seconds since 1970; `deltas` are by the digest of the chunk that
    each makes.
    """

    run: str
    run_id: str
    version: str
    weights: WeightTree
    model: Mapping[str, Any]
    probe: Probe | None
    created: float
    adapter: PublishedAdapter | None = None
    deltas: Mapping[str, Delta] = field(default_factory=dict[str, Delta])

    @property
    def digest(self) -> str:
        """Digest of the weights, in hex; for adapters, of their base too."""
        if self.adapter is None:
            return self.weights.digest
        parts = [self.adapter.rank, self.adapter.alpha, self.adapter.base.digest, self.weights.digest]
        return blake3.blake3(orjson.dumps(parts)).hexdigest()

    @property
    def trees(self) -> tuple[WeightTree, ...]:
        return (self.weights,) if self.adapter is None else (self.adapter.base, self.weights)

    def chunks(self) -> dict[str, Chunk]:
        """Return all chunks of these weights, by digest."""
        return {chunk.blake3: chunk for tree in self.trees for chunk in tree.chunks}

    def delta_chain(self, chunk: Chunk, have: Callable[[str], bool]) -> list[Delta]:
        """Return the deltas that make a chunk from one that is present, in order.

        Empty if there is none, or if the whole chunk is smaller.
        """
        deltas, n_bytes, wanted = list[Delta](), 0, chunk.blake3
        while (delta := self.deltas.get(wanted)) is not None and n_bytes + delta.chunk.size < chunk.size:
            if len(deltas) == MAX_WAY:
                break
            deltas.insert(0, delta)
            if have(delta.base):
                return deltas
            n_bytes, wanted = n_bytes + delta.chunk.size, delta.base
        return []

    def to_json(self) -> bytes:
        probe, adapter = self.probe, self.adapter
        record = {
            "schema": SCHEMA,
            "run": self.run,
            "beginning": self.run_id,
            "version": self.version,
            "digest": self.digest,
            "weights": self.weights.to_json(),
            "model": self.model,
            "probe": probe and {"input_ids": probe.input_ids, "logprobs": probe.logprobs, "noise": probe.noise},
            "created": self.created,
            "deltas": {name: [one.base, one.chunk.blake3, one.chunk.size] for name, one in self.deltas.items()},
            "adapter": adapter and {"rank": adapter.rank, "alpha": adapter.alpha, "base": adapter.base.to_json()},
        }
        return orjson.dumps(record)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse a manifest. Raises WeightsError naming what is wrong."""
        try:
            raw = codec.from_json(data, "manifest", _MAX_VALUES)
            if raw["schema"] != SCHEMA:
                raise WeightsError(f"manifest has schema {raw['schema']!r:.50}, expected {SCHEMA}")
            probe, adapter = raw["probe"], raw["adapter"]
            found = cls(
                run=text_of(raw, "run"),
                run_id=text_of(raw, "beginning"),
                version=str(WeightVersion.parse(text_of(raw, "version"))),
                weights=WeightTree.from_json(raw["weights"]),
                model=dict(raw["model"]),
                probe=None if probe is None else probe_of(probe),
                created=float(raw["created"]),
                adapter=None if adapter is None else PublishedAdapter.from_json(adapter),
                deltas={name: Delta.from_list(delta) for name, delta in raw["deltas"].items()},
            )
            if raw["digest"] != found.digest:
                raise ValueError("its digest does not match its weights")
        except (DecodeError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise WeightsError(f"manifest is malformed: {error!r}"[:_MAX_DETAIL]) from error
        return found


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """Offer of a version: digest and size of its manifest, and addresses of services that may have its chunks.

    The trainer's address comes first.
    """

    version: str
    manifest: Chunk
    sources: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        manifest = {"blake3": self.manifest.blake3, "size": self.manifest.size}
        return {"version": self.version, "manifest": manifest, "sources": list(self.sources)}

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Parse an offer. Raises InputError naming what is wrong."""
        try:
            version, manifest, sources = (raw[key] for key in ("version", "manifest", "sources"))
            digest, size = manifest["blake3"], manifest["size"]
            if not is_digest(digest) or type(size) is not int or not 0 < size <= MAX_MANIFEST_BYTES:
                raise ValueError("manifest must have a blake3 digest in hex and a size")
            if not (isinstance(sources, list | tuple) and 0 < len(sources) <= MAX_SOURCES):
                raise ValueError(f"sources must be 1 to {MAX_SOURCES} addresses")
            if not all(isinstance(url, str) and _ADDRESS.fullmatch(url) for url in sources):
                raise ValueError("a source must be an address, http://… or https://…")
            return cls(str(WeightVersion.parse(str(version))), Chunk(digest, size), tuple(sources))
        except KeyError as error:
            raise InputError(f"{error.args[0]} is missing", "version, manifest {blake3, size} and sources") from error
        except (TypeError, ValueError, DecodeError) as error:
            raise InputError(str(error)[:_MAX_DETAIL]) from error


def is_digest(value: Any) -> bool:
    """True if the value is 32 bytes in hex."""
    return isinstance(value, str) and len(value) == 64 and _DIGEST_CHARACTERS.issuperset(value)


def leaf_bytes(leaf: ManifestLeaf) -> int:
    """Return the size of an array. Raises ValueError for a dtype that weights are not published in."""
    if (item := _ITEM_BYTES.get(leaf.dtype)) is None:
        raise ValueError(f"{leaf.key[:80]} is of dtype {leaf.dtype[:20]}")
    return item * math.prod(leaf.shape)


def cuts(sizes: Sequence[int]) -> list[int]:
    """Return the chunk sizes of a stream of arrays of `sizes` bytes each; a large array starts a chunk."""
    found, shared = list[int](), 0
    for size in sizes:
        if size >= CHUNK_BYTES or shared + size > CHUNK_BYTES:
            found += [shared] if shared else []
            shared = 0
        whole, rest = divmod(size, CHUNK_BYTES) if size >= CHUNK_BYTES else (0, size)
        found += [CHUNK_BYTES] * whole
        if whole:
            found += [rest] if rest else []
        else:
            shared += rest
    return [*found, shared] if shared else found
