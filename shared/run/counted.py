"""Versions that count: the ancestors of a run's newest durable state, the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.run.lineage import epoch_of, in_lineage
from shared.run.state import TrainerState
from shared.types import WeightVersion

_VERSIONS = ("version", "version_min", "version_max")


def is_step(version: WeightVersion, head: TrainerState) -> bool:
    """True if the step that made `version` is an ancestor of the head."""
    return 1 <= version.step <= head.step and epoch_of(version.step, head.lineage) == version.epoch


def is_ancestor(version: WeightVersion, head: TrainerState) -> bool:
    """True if the weights `version` are an ancestor of the head, those that an epoch started with included."""
    return version.step <= head.step and in_lineage(version, head.lineage)


def versions_of(row: Mapping[str, Any]) -> list[WeightVersion]:
    """Return the versions that a line names.

    Raises DecodeError, and TypeError if a version is not text, or `step` is not a step of theirs.
    """
    found = [WeightVersion.parse(row[key]) for key in _VERSIONS if key in row]
    step = row.get("step")
    if found and (type(step) is not int or not found[0].step <= step <= found[-1].step):
        raise TypeError("the step is not that of the version")
    return found
