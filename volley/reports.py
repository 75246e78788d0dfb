"""Reports of runs, made by the package that brings the part `report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shared import packages
from shared.run.folder import RunFolder
from volley.printing import print_result
from volley.proof import Proof


class RunReports(Protocol):
    """Reads runs' folders and prints what they hold."""

    def main(self, run_dir: Path) -> int:
        """Print the report of a run. Returns the exit code. Raises ConfigError if the folder is not that of a run."""
        ...

    def make(self, folder: RunFolder) -> Mapping[str, Any]:
        """Write summary.json and the plot; return the summary."""
        ...

    def conclude(self, folder: RunFolder, summary: Mapping[str, Any], proof: Proof | None) -> None:
        """Print the report at a run's end, with its proof if there is one, and commands to go on with."""
        ...


class _NoReport:
    """Prints the proof alone."""

    def main(self, run_dir: Path) -> int:
        return 0

    def make(self, folder: RunFolder) -> Mapping[str, Any]:
        return {}

    def conclude(self, folder: RunFolder, summary: Mapping[str, Any], proof: Proof | None) -> None:
        if proof is not None:
            print_result({"verify": proof.result}, proof.text)


def reports() -> RunReports:
    """Return what reports runs; without a package for it, what reports only proofs."""
    return packages.part("report", required=False) or _NoReport()
