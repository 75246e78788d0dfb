"""Reject versions older than one that has served, until the run is restarted from an empty folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.serving import StagedUpdate
from shared.errors import Conflict, WeightsError
from shared.run import checkpoint_files
from shared.types import WeightVersion


@dataclass
class VersionFence:
    """`served` is the newest of the run's versions that has ever served, also if it no longer does."""

    served: StagedUpdate | None = None

    def check(
        self,
        found: StagedWeights,
        newest: WeightVersion | None,
        serving: StagedUpdate | None,
        run_id: str | None = None,
    ) -> None:
        """Raises Conflict for outdated weights, which an older trainer may still send; WeightsError for another base.

        Args:
            newest: the run's newest known version.
            run_id: identifier of the run that published the weights.
        """
        version = WeightVersion.of_name(found.version)
        if version is None:
            return
        if newest is not None and newest.epoch > version.epoch:
            raise Conflict(f"{found.version} has an earlier epoch than {newest}, the run's newest version")
        if self.served is None:
            return
        published = run_id is not None and self.served.run_id is not None
        if published and run_id != self.served.run_id:
            raise Conflict(
                f"{found.version} has another run id than {self.served.version}, which has served",
                "if the run was restarted in an empty folder, wait until this server has asked its trainer again",
            )
        if version < WeightVersion.parse(self.served.version):
            raise Conflict(
                f"{found.version} is older than {self.served.version}, which has served",
                "a server of a run only moves forward",
            )
        base = found.base.digest if found.base else None
        alike = published == (run_id is not None or self.served.run_id is not None)  # else digests are of other kinds
        if alike and self.served.base != base:
            raise WeightsError(
                f"{found.version} builds on base {base or 'nothing'},"
                f" but this server has {self.served.base or 'nothing'}",
                "all versions of a run build on one base",
            )
        if alike and serving is not None and serving.version == found.version and serving.digest != found.digest:
            raise Conflict(f"{found.version} is already serving with another digest", "a version is published once")

    def advance(self, update: StagedUpdate) -> None:
        """Record that `update` serves; weights with a name of their own are not the run's, and are ignored."""
        if WeightVersion.of_name(update.version) is not None:
            self.served = update

    def run_was_restarted(self, newest: Path) -> bool:
        """Return True if the run's folder was emptied and the run restarted. Blocks on disk.

        A run always keeps its newest version, at least among the damaged ones. So if the newest is older than the one
        that served, and that one is gone, the folder was emptied.
        """
        if (
            self.served is None
            or self.served.path is None
            or WeightVersion.parse(newest.name) >= WeightVersion.parse(self.served.version)
        ):
            return False
        return (
            not self.served.path.exists() and not (newest.parent / checkpoint_files.BAD / self.served.version).exists()
        )
