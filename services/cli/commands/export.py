"""`volley export`: a run's weights as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from services.cli.layout import variables_of
from services.cli.local import trainer_program
from services.cli.printing import printed
from shared.run import trust
from shared.run.folder import RunFolder


def main(run_dir: Path, folder: Path, version: str, *, adapter: bool = False) -> int:
    """Has the trainer's virtual environment write `folder`. Raises ConfigError, WeightsError."""
    if (run := RunFolder(run_dir.absolute())).config.exists():
        trust.check(run)
    arguments = [str(run_dir.absolute()), str(folder.absolute()), "--version", version]
    arguments += ["--adapter"] if adapter else []
    told = trainer_program.run("services.trainer.checkpoints.export", arguments, variables_of("trainer", cpu=True))
    printed(f"{folder} holds {told['version']} of {run_dir}: {told['tensors']} tensors, {told['dtype']}")
    if warning := told.get("warning"):
        printed(f"warning: {warning}")
    return 0
