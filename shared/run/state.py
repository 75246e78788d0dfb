"""State of a run in a checkpoint, beside the weights: position, finished tickets, lineage.

It is saved atomically with its weights. So each ticket is trained on exactly once along the surviving lineage of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import orjson

from shared import codec
from shared.errors import DecodeError, Unavailable, WeightsError
from shared.fields import read_text
from shared.files.reading import read_file
from shared.run import ledger, pinned, protected_files, saved
from shared.run.chain import Chain
from shared.run.checkpoint_files import (
    Manifest,
    ManifestFile,
    digest,
    read_manifest,
    seal,
    unreadable,
    verify_files,
    versions,
)
from shared.run.lineage import ForkPoint
from shared.run.pinned import Flat, Settings
from shared.run.progress import TicketProgress
from shared.run.protected_files import Losses, ProtectedFiles
from shared.types import Lineage, WeightVersion

SCHEMA = 2
_MOST = 2**53
_MAX_DETAIL = 300
MAX_STATE_BYTES = 64 * 2**20
MOST_VALUES = MAX_STATE_BYTES // 12
"""Trainers write at least 12 bytes per value: 13 per ticket of seven digits, 17 per value of a ledger line."""
_MOST_EPOCHS = 50_000
"""Largest number of epochs in a lineage: a run that is restarted every minute for a month."""
STATE, OPTIMIZER = "state.json", "optimizer"
Phase = Literal["rl", "done"]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of the trainer after `step` optimizer steps.

    `low`, `done`, `void` are `TicketProgress`; `issued` is the highest ticket seen. `lineage` lists (epoch, first
    step), oldest first: epochs ascend, steps do not fall. `reference` is the version whose weights the KL term compares
    with. `recent` are the ledger lines of the tickets that this checkpoint trained; `metrics` are the lines of
    metrics.jsonl of its steps, and earlier ones that the file may not durably hold; an epoch's first checkpoint has
    those of its predecessor. `seed` determines all randomness.

    `settings` is the configuration in force, by epoch (see shared.run.pinned); `chain` covers everything before.
    `origin` is the version of another run that the run started from, if any (see
    shared.models.origin). `data` describes the data of supervised training, by digest (also of its `files`), and the
    position in it; there `step` counts supervised steps. `files` are prefixes of other files of the run, `losses`
    counts how often each lost lines (see shared.run.protected_files). `forks` are the logs of other runs
    whose groups this run has trained on (see volley_python.folder.forks).
    """

    epoch: int
    step: int
    low: int
    done: tuple[int, ...]
    issued: int
    void: int
    seed: int
    phase: Phase
    lineage: tuple[tuple[int, int], ...]
    reference: str | None = None
    recent: tuple[Mapping[str, Any], ...] = ()
    settings: Settings = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    chain: Chain = field(default_factory=Chain)
    origin: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    files: ProtectedFiles = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)
    forks: tuple[ForkPoint, ...] = ()
    schema: int = SCHEMA

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.epoch, self.step)

    def progress(self) -> TicketProgress:
        return TicketProgress(self.low, self.done, self.void)

    def starting_epoch(
        self,
        epoch: int,
        *,
        keep_reference: bool,
        settings: Flat | None = None,
        origin: Mapping[str, Any] | None = None,
        forks: tuple[ForkPoint, ...] = (),
    ) -> Self:
        """Return the state at the start of a new incarnation, with new settings, or new `forks`, if given.

        The first incarnation's weights become the reference, if one is kept; `origin` is the version that they come
        from.
        """
        reference = self.reference or (
            str(WeightVersion(epoch, self.step)) if keep_reference and not self.lineage else None
        )
        amended = pinned.amended(self.settings, epoch, settings or {})
        lineage = (*self.lineage, (epoch, self.step))
        origin = self.origin if self.lineage else origin
        return replace(
            self,
            epoch=epoch,
            lineage=lineage,
            reference=reference,
            recent=(),
            settings=amended,
            origin=origin,
            forks=forks or self.forks,
        )

    def at(
        self,
        step: int,
        progress: TicketProgress,
        *,
        issued: int,
        done: bool,
        chain: Chain,
        recent: tuple[Mapping[str, Any], ...] = (),
        metrics: tuple[Mapping[str, Any], ...] = (),
        files: ProtectedFiles | None = None,
    ) -> Self:
        """Return the state of the same incarnation after `step` steps; `files` as they are now, if they were read."""
        finished = sorted(progress.done)
        issued = max([issued, progress.low, *finished])
        return replace(
            self,
            step=step,
            low=progress.low,
            done=tuple(finished),
            void=progress.void,
            issued=issued,
            phase="done" if done else "rl",
            recent=recent,
            metrics=metrics,
            chain=chain,
        ).with_files(files)

    def with_files(self, files: ProtectedFiles | None, rewritten: Collection[str] = ()) -> Self:
        """Return the same state with `files` as they are now, if they were read; `rewritten` have another prefix."""
        if files is None:
            return self
        return replace(self, files=files, losses=protected_files.losses(self.files, files, self.losses, rewritten))

    def to_json(self, **extra: Any) -> bytes:
        return orjson.dumps({**asdict(self), **extra}, option=orjson.OPT_INDENT_2)

    @classmethod
    def from_mapping(cls, raw: Any) -> Self:
        """Parse a state. Raises WeightsError naming what is wrong."""
        try:
            schema = _count(raw, "schema")
            if schema != SCHEMA:
                raise WeightsError(f"state.json has schema {schema}, expected {SCHEMA}")
            return cls(
                epoch=_count(raw, "epoch"),
                step=_count(raw, "step"),
                low=_count(raw, "low"),
                done=tuple(_counts(_list(raw, "done"))),
                issued=_count(raw, "issued"),
                void=_count(raw, "void"),
                seed=_int(raw["seed"]),
                phase=_phase(raw["phase"]),
                lineage=parse_lineage(_list(raw, "lineage")),
                reference=None if raw["reference"] is None else str(WeightVersion.parse(read_text(raw["reference"]))),
                recent=tuple(map(ledger.checked, _list(raw, "recent"))),
                settings=pinned.parse(raw["settings"]),
                metrics=tuple(map(_of_metrics, _list(raw, "metrics"))),
                chain=Chain.from_mapping(raw["chain"]),
                origin=_origin(raw["origin"]),
                data=_data(raw["data"]),
                files=protected_files.parse(raw["files"]),
                losses=protected_files.parse_losses(raw["losses"]),
                forks=parse_forks(raw["forks"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, DecodeError) as error:
            raise WeightsError(f"state.json lacks or mistypes a field: {error!r}"[:_MAX_DETAIL]) from error


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise TypeError(f"expected an integer, got {str(value)[:50]!r}")
    return value


def _count(raw: Any, key: str) -> int:
    if not isinstance(raw, dict):
        raise TypeError(f"expected an object, got {type(raw).__name__}")
    if _int(raw[key]) < 0:
        raise ValueError(f"{key} is negative")
    return raw[key]


def _counts(values: list[Any]) -> list[int]:
    if any(_int(value) < 0 for value in values):
        raise ValueError("a count is negative")
    return values


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(raw[key], list):
        raise TypeError(f"{key} is not a list")
    return raw[key]


def _began(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise TypeError("the lineage is not a list of pairs")
    epoch, step = _counts(pair)
    return epoch, step


def parse_lineage(pairs: list[Any]) -> Lineage:
    """Parse a lineage. Raises TypeError or ValueError."""
    if len(pairs) > _MOST_EPOCHS:
        raise ValueError(f"the lineage has {len(pairs)} epochs, more than {_MOST_EPOCHS}")
    lineage = tuple(map(_began, pairs))
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(lineage)):
        raise ValueError("the lineage does not ascend")
    return lineage


def parse_forks(raw: Any) -> tuple[ForkPoint, ...]:
    """Parse fork points. Raises KeyError, TypeError or ValueError."""
    found = ((read_text(one["run"]), _count(one, "step"), parse_lineage(_list(one, "lineage"))) for one in raw)
    return tuple(ForkPoint(*one) for one in found)


def _phase(value: Any) -> Phase:
    if value == "rl" or value == "done":
        return value
    raise ValueError(f"unknown phase {str(value)[:50]!r}")


def _of_metrics(line: Any) -> Mapping[str, Any]:
    if not isinstance(line, dict):
        raise TypeError("a line of metrics is not an object")
    WeightVersion.parse(read_text(line["version"]))
    return line


def _origin(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    origin = dict(value)
    if not all(isinstance(text, str) for text in (*origin, *origin.values())):
        raise TypeError("origin is not text by name")
    return origin


def _data(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    data = dict(value)
    made: dict[str, Any] = {"digest": read_text(data["digest"])}
    if "files" in data:
        made["files"] = {read_text(path): read_text(digest) for path, digest in data["files"].items()}
    return made | {key: _count(data, key) for key in ("examples", "epoch", "offset")}


def initial_state(seed: int) -> TrainerState:
    """Return the state before any checkpoint: epoch 0, step 0."""
    return TrainerState(
        epoch=0,
        step=0,
        low=0,
        done=(),
        issued=0,
        void=0,
        seed=seed,
        phase="rl",
        lineage=(),
    )


def read(folder: Path) -> tuple[TrainerState, tuple[ManifestFile, ...]]:
    """Read the state of a checkpoint, and the files below its `optimizer/` with their digests.

    Raises WeightsError, and Unavailable if it cannot be read now.
    """
    state, files, _ = _read(folder)
    return state, files


def check_readable(folder: Path) -> None:
    """Read back a state that was just written. Raises WeightsError if that fails: better now than at the restart."""
    try:
        read(folder)
    except WeightsError as error:
        raise WeightsError(
            f"the new checkpoint cannot be read back, so the older ones are kept: {error.detail}",
            "it carries a line of each group of its step: lower trainer.groups_per_step",
        ) from error


def _read(folder: Path) -> tuple[TrainerState, tuple[ManifestFile, ...], str]:
    """Also return the seal of the manifest."""
    try:
        raw = codec.from_record(read_file(folder / STATE, MAX_STATE_BYTES), STATE, MOST_VALUES)
        state = TrainerState.from_mapping(raw)
        return state, tuple(map(ManifestFile.from_mapping, _list(raw, "optimizer_files"))), read_text(raw["seal"])
    except OSError as error:
        raise unreadable(str(folder / STATE), error) from error
    except (KeyError, TypeError, DecodeError) as error:
        raise WeightsError(f"{folder / STATE} cannot be read: {error!r}"[:_MAX_DETAIL]) from error


def verify(folder: Path) -> tuple[Manifest, TrainerState]:
    """Verify a checkpoint: all files against their digests, and the manifest against checkpoints.jsonl.

    Returns manifest and state. Raises WeightsError, and Unavailable if the files cannot be read now.
    """
    found = verify_digests(folder)
    saved.check(folder)
    return found


def verify_digests(folder: Path) -> tuple[Manifest, TrainerState]:
    """Verify a checkpoint as `verify` does, from its folder alone."""
    manifest = read_manifest(folder)
    state, optimizer_files, sealed = _read(folder)
    try:
        found = digest(folder / STATE)
    except OSError as error:
        raise unreadable(str(folder / STATE), error) from error
    if manifest.state != found:
        raise WeightsError(f"{manifest.version}: digest of {STATE} differs")
    if sealed != seal(manifest):
        raise WeightsError(f"{manifest.version}: the manifest is not the one that {STATE} was saved with")
    verify_files(folder, manifest)
    verify_files(folder, replace(manifest, path=OPTIMIZER, files=optimizer_files))
    return manifest, state


def newest_state(root: Path) -> TrainerState | None:
    """Return the newest readable state under `root`, without checking its digest; None without one."""
    for version in reversed(versions(root)):
        try:
            return read(root / str(version))[0]
        except (WeightsError, Unavailable):
            continue  # damaged, or removed by the trainer meanwhile
    return None
