"""The one place that knows the names of the files in a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BEGINNING = "beginning"
type Record = Literal["samples", "evals", "mixture"]
"""What the orchestrator writes, and hands over to the trainer."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run, by what they hold.

    `metrics` and `handovers` have a line a step, `ledger` one a ticket, `saved` one a checkpoint, `refused` one a
    refused step, whose groups are below `refused_groups`, `sft` one a supervised step, `demonstrations` one a
    conversation that a run of SFT had from an environment (all written by the trainer); `evals` a line an evaluation,
    `samples` some of its episodes, `mixture` a line a change of the mixture, `teacher` what asking one has cost (by
    the orchestrator);
    `environments` keeps what was submitted (by the environment service). The rest is the supervisor's.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def services(self) -> Path:
        return self.path / "services.yaml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def processes(self) -> Path:
        return self.path / "processes.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def sft(self) -> Path:
        return self.path / "sft.jsonl"

    @property
    def demonstrations(self) -> Path:
        return self.path / "demonstrations.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def teacher(self) -> Path:
        return self.path / "teacher.sqlite3"

    @property
    def environments(self) -> Path:
        return self.path / "environments"

    @property
    def environment_data(self) -> Path:
        """Digests of what decides the tasks of each environment (by the environment service)."""
        return self.environments / "data.json"

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def saved(self) -> Path:
        return self.path / "checkpoints.jsonl"

    @property
    def refused(self) -> Path:
        return self.path / "refused.jsonl"

    @property
    def refused_groups(self) -> Path:
        return self.path / "refused"

    @property
    def bucket(self) -> Path:
        """Which folder this is to the run's bucket."""
        return self.path / "bucket.json"

    @property
    def soak(self) -> Path:
        return self.path / "soak.json"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def mixture(self) -> Path:
        return self.path / "mixture.jsonl"

    @property
    def handed_over(self) -> Mapping[Record, Path]:
        return {"samples": self.samples, "evals": self.evals, "mixture": self.mixture}

    @property
    def beginning(self) -> Path:
        """Copy of the name of the run's beginning, which is in `published` as well."""
        return self.path / ".beginning"

    @property
    def recorded_beginning(self) -> Path:
        """Of which beginning of the run those are, where the orchestrator has a folder of its own as well."""
        return self.path / "evals.beginning"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def secrets(self) -> Path:
        return self.path / ".secrets"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def published(self) -> Path:
        """The newest versions as chunks: the trainer's alone."""
        return self.path / "published"

    def pulled(self, server: str) -> Path:
        """Chunks that a rollout server has pulled: its alone."""
        return self.path / "pulled" / server

    @property
    def handovers(self) -> Path:
        return self.path / "handovers.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"
