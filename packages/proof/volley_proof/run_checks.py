"""Checks of a run for the trainer and `volley export`: the part `run_checks`. Each is imported when it is used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from services.trainer.interfaces import (
    EpisodeScorer,
    RecordCheck,
    RunChecks,
    ServerChecks,
    TrainerBackend,
)
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.data_schema import DataSection
from shared.run.folder import Record, RunFolder


class Checks(RunChecks):
    """See `RunChecks`."""

    def check_log(self, checkpoint: Path) -> None:
        from volley_proof.checkpoints.logged import check_log

        check_log(checkpoint)

    def of_records(
        self, folder: RunFolder, run: str, data: DataSection, versions: Callable[[str], Awaitable[object]]
    ) -> Mapping[Record, RecordCheck]:
        from volley_proof.records.checks import RecordChecks

        return RecordChecks(folder, run, data, versions).by_record

    def episode_scorer(self, model: Any, scorer: Any, temperature: float, layout: Any) -> EpisodeScorer:
        from volley_proof.spot_checks.scorer import SpotScorer

        return SpotScorer(model, scorer, temperature, layout)

    def server_checks(
        self, backend: TrainerBackend, status: TrainerStatus, waiter: Waiter, *, truncated: bool
    ) -> ServerChecks:
        from volley_proof.spot_checks.checks import SpotChecks

        return SpotChecks(backend, status, waiter, truncated=truncated)


CHECKS = Checks()
