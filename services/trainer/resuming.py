"""Whether a configuration may go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from shared.process import telemetry
from shared.run import pinned
from shared.run.pinned import Flat
from shared.run.state import TrainerState

_log = telemetry.Log("worker")


def under_settings(found: TrainerState, settings: Flat, original: Flat) -> TrainerState:
    """The state with the settings it was made under: of a checkpoint that is older than they, `original` or what the
    run has now. Raises ConfigError if ours are others that may not change.
    """
    began = original or settings
    if not found.settings and found.lineage and began:
        found = replace(found, settings=((found.lineage[0][0], began),))
    if found.settings and settings:
        for change in pinned.permitted(pinned.in_force(found.settings, found.epoch), settings, step=found.step):
            _log.info("setting changed", change=str(change), from_step=found.step)
    return found
