"""Names of the files in a run's folder, defined only here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

RUN_ID = "beginning"
type Record = Literal["samples", "evals", "mixture"]
"""Records that the orchestrator writes and hands over to the trainer."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of one run.

    The trainer writes `metrics` and `handovers` (a line per step), `ledger` (per ticket), `saved` (per checkpoint),
    `refused` (per refused step, whose groups are below `refused_groups`), `sft` (per supervised step) and
    `demonstrations` (per conversation that a supervised run got from an environment). The orchestrator writes `evals`
    (a line per evaluation), `samples` (some of its episodes), `mixture` (per change of the mixture), `teacher` (what
    the teacher has cost), `judges` (answers of judges of groups, and their cost), `sessions` (agents' calls) and
    `partials` (running episodes). The environment service keeps submissions in `environments`. The supervisor writes
    the rest.
    """

    path: Path

    def check(self) -> None:
        """Raise ConfigError if this is not the folder of a run, with the nearest one beside it as the hint."""
        if self.config.is_file():
            return
        problem = "it holds no config.yaml" if self.path.is_dir() else "there is no such folder"
        raise ConfigError(f"{self.path} is not the folder of a run: {problem}", self.hint())

    def hint(self) -> str:
        """Name the run beside this folder whose name is nearest, or say what to give."""
        for parent in (self.path.parent, self.path.parent / "runs"):
            with suppress(OSError):
                runs = [one.name for one in parent.iterdir() if (one / self.config.name).is_file()]
                if near := get_close_matches(self.name, runs, n=1):
                    return f"did you mean {parent / near[0]}?"
        return "give a run's folder, such as runs/quickstart"

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
    def judges(self) -> Path:
        return self.path / "judges.sqlite3"

    @property
    def partials(self) -> Path:
        return self.path / "partials.sqlite3"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions.sqlite3"

    @property
    def environments(self) -> Path:
        return self.path / "environments"

    @property
    def environment_data(self) -> Path:
        """Digests of the data that decides each environment's tasks (written by the environment service)."""
        return self.environments / "data.json"

    @property
    def choices(self) -> Path:
        """Reasons of the settings that the supervisor chose."""
        return self.path / "choices.json"

    @property
    def model(self) -> Path:
        """config.json and tokenizer of the run that this one started from."""
        return self.path / "model"

    @property
    def inputs(self) -> Path:
        """Files that a Python program handed over: rows, rewards, tools."""
        return self.path / "inputs"

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
    def fork(self) -> Path:
        """Origin of a fork (see volley_python.folder.forks)."""
        return self.path / "fork.json"

    @property
    def mended(self) -> Path:
        """Groups of a fork's log with new rewards, as an archive of the other run."""
        return self.path / "mended"

    @property
    def refused(self) -> Path:
        return self.path / "refused.jsonl"

    @property
    def refused_groups(self) -> Path:
        return self.path / "refused"

    @property
    def tokens(self) -> Path:
        """The trainer's values of archived tokens (see shared.run.token_values), if somebody asked for them."""
        return self.path / "tokens"

    def tracker(self, name: str) -> Path:
        """Lines of the run that a tracker has."""
        return self.path / "trackers" / f"{name}.json"

    @property
    def bucket(self) -> Path:
        """Identity of this folder towards the run's bucket."""
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
    def run_id(self) -> Path:
        """Copy of the run's identifier, which is in `published` too."""
        return self.path / ".beginning"

    @property
    def recorded_run_id(self) -> Path:
        """Identifier of the run whose records an orchestrator's own folder holds."""
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
        """The newest versions as chunks; only the trainer uses it."""
        return self.path / "published"

    def pulled(self, server: str) -> Path:
        """Chunks that a rollout server has pulled; only that server uses it."""
        return self.path / "pulled" / server

    @property
    def handovers(self) -> Path:
        return self.path / "handovers.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"
