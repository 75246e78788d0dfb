"""Supervised runs, which the package volley-rl-supervised configures, follows and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from shared import packages
from shared.config import LoadedConfig
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from volley.local.stack import LocalStack
from volley.reporting.progress import ProgressDisplay, Record, RecordTails


class SupervisedRuns(Protocol):
    """See volley_supervised.runs."""

    def configured(
        self,
        mode: Literal["sft", "dpo"],
        data: Sequence[Path],
        model: str | None,
        *,
        held_out: Sequence[Path],
        epochs: int | None,
        configs: Sequence[str],
        overrides: Sequence[str],
    ) -> LoadedConfig: ...

    def check_files(self, config: RunConfig) -> None: ...

    async def follow(
        self, running: LocalStack, folder: RunFolder, display: ProgressDisplay, tails: RecordTails
    ) -> None: ...

    def line(self, record: Record) -> str: ...

    def report(self, folder: RunFolder) -> int: ...


def supervised_runs() -> SupervisedRuns:
    """Raises ConfigError if the package is not installed."""
    return packages.part("supervised.runs")
