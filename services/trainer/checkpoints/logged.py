"""A checkpoint against the log of its run (see shared.run.checksums)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from services.trainer.checkpoints.contents import ArrayFiles
from shared.errors import WeightsError
from shared.run import checksums, weights
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.run.weights import Manifest


def check_log(folder: Path, arrays: ArrayFiles) -> None:
    """Raises WeightsError if a whole checkpoint holds other arrays than the log of its run tells, or describes them
    otherwise, and Unavailable if one of them cannot be read now.
    """

    def of_version(name: str) -> Manifest | None:
        with suppress(WeightsError):
            return weights.read_manifest(folder.parent / name)
        return None

    manifest, (state, _) = weights.read_manifest(folder), states.read(folder)
    if not (told := checksums.told_in(RunFolder(folder.parent.parent), state)):
        return
    why = checksums.misdescribed(manifest, state, told, of_version)
    if why or (why := checksums.contradiction(arrays.checksums(folder), told)):
        raise WeightsError(f"{folder.name}: {why}", "somebody has changed the checkpoint: choose another version")
