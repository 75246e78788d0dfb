"""Check of a checkpoint against the log of its run (see shared.run.checksums)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shared.errors import WeightsError
from shared.run import checkpoint_files, checksums
from shared.run import state as states
from shared.run.checkpoint_files import Manifest
from shared.run.folder import RunFolder
from volley_proof.verify.parameters import ORBAX


def check_log(folder: Path) -> None:
    """Check a valid checkpoint's arrays and description against the log of its run.

    Raises WeightsError if they differ, and Unavailable if one of them cannot be read now.
    """

    def of_version(name: str) -> Manifest | None:
        with suppress(WeightsError):
            return checkpoint_files.read_manifest(folder.parent / name)
        return None

    manifest, (state, _) = checkpoint_files.read_manifest(folder), states.read(folder)
    if not (logged := checksums.witnesses_in(RunFolder(folder.parent.parent), state)):
        return
    why = checksums.misdescribed(manifest, state, logged, of_version)
    found: checksums.Checksums = {}
    if (folder / ORBAX).exists():
        from volley_proof.checkpoints import parameters  # imports TensorStore, which not every process has

        found = parameters.checksums_of(folder)
    if why or (why := checksums.contradiction(found, logged)):
        raise WeightsError(f"{folder.name}: {why}", "the checkpoint was changed: choose another version")
