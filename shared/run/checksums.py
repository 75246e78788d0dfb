"""Checksums of a checkpoint's arrays, and a digest of its description, as the log records them.

A commit record has the checksum of the parameters, a line of metrics all of them (`checksums`), and the chain covers
that line. Invariant: the process that made the step computed them from memory, before any checkpoint of it existed. So
a changed checkpoint contradicts the log even if the digests in its folder were recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, cast

import blake3
import orjson

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError, WeightsError
from shared.files.reading import whole_lines
from shared.run import commits
from shared.run.checkpoint_files import PARAMS, Adapter, Manifest, ManifestLeaf, Probe, unreadable
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.lineage import epoch_of
from shared.run.state import OPTIMIZER, STATE, TrainerState
from shared.types import WeightVersion

CHECKSUMS = "checksums"
DESCRIPTION = "description"
_ARRAYS = {PARAMS: "parameters", OPTIMIZER: "optimizer"}

type Checksums = Mapping[str, str]
"""Checksums by part: the trained parameters, the optimizer's state (a critic's included), and the description."""
type Told = tuple[str, Checksums]
"""A source and the checksums it records."""


def description(
    model: Mapping[str, Any], tree: Iterable[ManifestLeaf], adapter: Adapter | None, probe: Probe | None
) -> str:
    """Return the blake3 of a manifest's description of its weights, in hex.

    The log holds it, so its format never changes.
    """
    of_adapter = None if adapter is None else [adapter.rank, float(adapter.alpha), adapter.base.digest]
    leaves = sorted((asdict(leaf) for leaf in tree), key=lambda leaf: leaf["key"])
    plain = {"model": model, "tree": leaves, "adapter": of_adapter, "probe": None if probe is None else asdict(probe)}
    return blake3.blake3(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)).hexdigest()


def made_as(state: TrainerState) -> WeightVersion:
    """Return the version whose step made these weights; an epoch starts with the weights of an earlier step."""
    return WeightVersion(epoch_of(state.step, state.lineage) or state.epoch, state.step)


def witnesses(
    state: TrainerState, records: Mapping[WeightVersion, CommitRecord], lines: Sequence[Mapping[str, Any]]
) -> list[Told]:
    """Collect the checksums that records, `state.json` and lines of metrics hold of the weights of `state`.

    Args:
        lines: of metrics.jsonl, of any versions.
    """
    made, found = made_as(state), list[Told]()
    for version in dict.fromkeys((state.version, made)):
        if (record := records.get(version)) is not None:
            found.append((f"the commit record of {version}", {PARAMS: record.checksum}))
            found += _of_lines(f"the commit record of {version}", record.state.metrics, made)
    return [*found, *_of_lines(STATE, state.metrics, made), *_of_lines("metrics.jsonl", lines, made)]


def witnesses_in(run: RunFolder, state: TrainerState) -> list[Told]:
    """Collect them from the run's folder.

    Raises Unavailable if it cannot be read now, and WeightsError if metrics.jsonl is not a file.
    """
    records, made = dict[WeightVersion, CommitRecord](), made_as(state)
    for version in {state.version, made}:
        with suppress(WeightsError):
            records[version] = commits.read(run.archive, version)
    try:
        return witnesses(state, records, [*lines_of(run, {made})])
    except OSError as error:
        raise unreadable(str(run.metrics), error) from error


def lines_of(run: RunFolder, versions: Iterable[WeightVersion]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of metrics.jsonl that hold checksums of these versions. Raises OSError."""
    names = [str(version).encode() for version in versions]
    for text in whole_lines(run.metrics) if names else ():
        if f'"{CHECKSUMS}"'.encode() in text and any(name in text for name in names):
            with suppress(DecodeError):
                line = codec.from_record(text, "a line of metrics", MAX_LINE_VALUES)
                if isinstance(line, dict):
                    yield cast(dict[str, Any], line)


def contradiction(found: Checksums, log: Iterable[Told]) -> str | None:
    """Describe how the arrays of a checkpoint differ from the log; None if they agree."""
    for source, theirs in log:
        for part, name in _ARRAYS.items():
            if part in found and part in theirs and found[part] != theirs[part]:
                return f"the checksum of its {name} is {found[part]}, {source} says {theirs[part]}"
    return None


def misdescribed(
    manifest: Manifest, state: TrainerState, log: Iterable[Told], of_version: Callable[[str], Manifest | None]
) -> str | None:
    """Describe how a manifest's description of its weights differs from the log; None if it agrees.

    Also None if another trainer than the one that made the step wrote the manifest: it may describe the same weights in
    other words.

    Args:
        of_version: returns the manifest of another version, if it is retained: an epoch starts with a copy.
    """
    made, at = made_as(state), manifest
    while str(made) not in (at.version, at.base_version):
        base = None if at.base_version is None else of_version(at.base_version)
        if base is None or base.step != at.step or base.weight_version >= at.weight_version:
            return None
        at = base
    described = description(manifest.model, manifest.tree, manifest.adapter, manifest.probe)
    for source, theirs in log:
        if theirs.get(DESCRIPTION, described) != described:
            return f"its manifest does not describe model, arrays, adapters and probe as {source} does"
    return None


def _of_lines(source: str, lines: Iterable[Mapping[str, Any]], made: WeightVersion) -> list[Told]:
    mine = (line.get(CHECKSUMS) for line in lines if line.get("version") == str(made))
    return [(source, {str(part): str(value) for part, value in one.items()}) for one in mine if isinstance(one, dict)]
