"""Plots of runs, drawn by the package that brings the part `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shared import packages
from volley.reporting.environments import EnvironmentCurve
from volley.reporting.intervals import SuccessRate

type Rows = Sequence[Mapping[str, Any]]


class Plots(Protocol):
    """Writes PNG files."""

    def draw(
        self,
        path: Path,
        run: str,
        steps: Rows,
        evals: Rows,
        changed: Sequence[int],
        environments: Sequence[EnvironmentCurve],
    ) -> None:
        """Draw one run.

        Args:
            steps, evals: rows of metrics.jsonl and evals.jsonl, by step; with several environments, `evals` holds
                those of the first.
            changed: steps from which on other settings were in force.
            environments: curve of each environment, if there are several.
        """
        ...

    def draw_beside(self, path: Path, runs: Mapping[str, Sequence[SuccessRate]]) -> None:
        """Draw the held-out success of several runs, by label."""
        ...


def plots(*, required: bool = False) -> Plots | None:
    """Return what draws plots. If no installed package does, raise ConfigError, or return None."""
    return packages.part("plots", required=required)
