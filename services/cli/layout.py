"""Where things lie: the project, its virtual environments, and the files of a run's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / ".cache"


def python_of(environment: str) -> Path:
    """The interpreter of an virtual environment: base, rollout or trainer.

    VOLLEY_VENVS names another folder than the project's `.venvs`. Raises ConfigError if the environment is not
    installed.
    """
    root = Path(os.environ.get("VOLLEY_VENVS") or PROJECT / ".venvs")
    python = root / environment / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ConfigError(f"the virtual environment {root / environment} is missing", "install it with `make install`")
    return python


def variables_of(environment: str, *, cpu: bool) -> dict[str, str]:
    """The caller's variables, plus JAX's platform if it is to be the CPU, and JAX's compilation cache in the project.

    Bytecode is written, whatever the caller has set: a service that may not keep it compiles every imported module at
    every start.
    """
    added = {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(CACHE / f"jax-{environment}")}
    if cpu:
        added["JAX_PLATFORMS"] = "cpu"
    return {**added, **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. `metrics` has a line a step (written by the trainer), `evals` a line an evaluation."""

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
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

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
