"""Check of a configuration against the checkpoint that it resumes from."""

from __future__ import annotations

from dataclasses import replace

from shared.process import telemetry
from shared.run import pinned
from shared.run.pinned import Flat
from shared.run.state import TrainerState

_log = telemetry.Log("worker")


def resolve_settings(found: TrainerState, settings: Flat, original: Flat, free: tuple[str, ...] = ()) -> TrainerState:
    """Return the state with the settings that it was trained under.

    A checkpoint that records no settings gets `original`, or else `settings`. Raises ConfigError if `settings` changes
    a setting that may not change; those that start with one of `free` may.
    """
    began = original or settings
    if not found.settings and found.lineage and began:
        found = replace(found, settings=((found.lineage[0][0], began),))
    if found.settings and settings:
        was = pinned.in_force(found.settings, found.epoch)
        for change in pinned.permitted(was, settings, step=found.step, free=free):
            _log.info("setting changed", change=str(change), from_step=found.step)
    return found
