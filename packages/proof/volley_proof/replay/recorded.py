"""Recorded steps of a run's folder, for retraining. Reads only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import codec, config
from shared.bounds import MAX_LINE_VALUES
from shared.config import LoadedConfig
from shared.errors import ConfigError, DecodeError, Forbidden, Unavailable, WeightsError
from shared.files import storage
from shared.run import archive, checkpoint_files, commits, pinned
from shared.run import state as states
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.lineage import epoch_of, in_lineage, surviving
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.types import Group, WeightVersion

COMPARED_METRICS = ("loss", "grad_norm")
_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Records of a run's steps.

    `head` is the newest durable state, `checkpoints` those of its lineage by step; `metrics`, and `checksums` of the
    parameters, are by version.
    """

    folder: Path
    run: str
    head: TrainerState
    checkpoints: Mapping[int, Path]
    metrics: Mapping[str, Mapping[str, Any]]
    checksums: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, run: str) -> RecordedStep:
        """Read the records. Raises WeightsError if no checkpoint is valid."""
        root = RunFolder(folder).checkpoints
        records = {record.version: record for record in _records(RunFolder(folder).archive)}
        head = max((_head(root), *(record.state for record in records.values())), key=lambda state: state.version)
        mine = [v for v in checkpoint_files.versions(root) if in_lineage(v, head.lineage)]
        return cls(
            folder,
            run,
            head,
            {v.step: root / str(v) for v in mine},
            _metrics(RunFolder(folder).metrics),
            {str(version): record.checksum for version, record in records.items()},
        )

    def version(self, step: int) -> WeightVersion:
        epoch = epoch_of(step, self.head.lineage)
        return WeightVersion(self.head.lineage[0][0] if epoch is None else epoch, step)

    def config_at(self, step: int, stored: LoadedConfig) -> RunConfig:
        """Return the stored configuration with the settings that `step` was trained with."""
        return self.config_of(self.version(step).epoch, stored)

    def config_of(self, epoch: int, stored: LoadedConfig) -> RunConfig:
        """Return the stored configuration with the settings of `epoch`."""
        return config.apply_settings(stored.config, pinned.in_force(self.head.settings, epoch))

    def groups(self, step: int) -> list[tuple[Group, bytes]]:
        """Read the groups of `step`, with their wire bytes. Raises DecodeError."""
        payloads = archive.read(RunFolder(self.folder).archive, self.run, self.version(step))
        return [(Group.decode(payload), payload) for payload in payloads]

    def bounds(self, first: int, last: int | None) -> range:
        """Return the steps to train. Raises ConfigError that names the retained checkpoints."""
        end = self.head.step if last is None else last
        if first not in self.checkpoints:
            there = ", ".join(map(str, sorted(self.checkpoints)))
            raise ConfigError(
                f"no checkpoint of step {first} is retained",
                f"choose another step; checkpoints are retained of steps {there}",
            )
        if not first < end <= self.head.step:
            raise ConfigError(
                f"there is nothing to replay from step {first} to {end}",
                f"choose steps up to the newest durable one, {self.head.step}",
            )
        return range(first + 1, end + 1)


def _records(root: Path) -> Iterator[CommitRecord]:
    """Yield the readable commit records."""
    for version in commits.versions(root):
        with suppress(WeightsError, Unavailable):
            yield commits.read(root, version)


def _head(root: Path) -> TrainerState:
    for version in reversed(surviving(checkpoint_files.versions(root))):
        try:
            return states.verify(root / str(version))[1]
        except (WeightsError, Forbidden):
            continue
    raise WeightsError(f"no checkpoint in {root} is valid")


def _metrics(path: Path) -> dict[str, dict[str, Any]]:
    """Read the lines by version. Raises DecodeError that names an invalid line."""
    found: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(storage.whole_lines(path), start=1):
        try:
            line = codec.from_record(text, "it", MAX_LINE_VALUES)
            WeightVersion.parse(line["version"])
            if not all(isinstance(line[name], int | float | None) for name in COMPARED_METRICS):
                raise TypeError("a metric is not a number")
        except (KeyError, TypeError, DecodeError) as error:
            raise DecodeError(
                f"line {number} of {path} is not a line of metrics: {error}"[:_MAX_DETAIL],
                "run `volley verify` for the full list of problems",
            ) from error
        found[line["version"]] = line
    return found
