"""Check of a configuration against the checkpoint that it resumes from."""

from __future__ import annotations

from shared.process import telemetry
from shared.run import pinned
from shared.run.pinned import Flat
from shared.run.state import TrainerState

_log = telemetry.Log("worker")


def check_settings(found: TrainerState, settings: Flat, free: tuple[str, ...] = ()) -> TrainerState:
    """Return the state.

    Raises ConfigError if `settings` changes a setting that may not change; those that start with one of `free` may.
    """
    if found.settings and settings:
        was = pinned.in_force(found.settings, found.epoch)
        for change in pinned.permitted(was, settings, step=found.step, free=free):
            _log.info("setting changed", change=str(change), from_step=found.step)
    return found
