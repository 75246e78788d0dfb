"""State of a run that all pages show, decided from its files and its services' reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BEFORE_STEPS = ("loading", "replaying", "starting")
"""Phases of a trainer that is not ready for steps."""


def state_of(recorded: str, report: Mapping[str, Any], *, has_answered: bool) -> str:
    """Return the state of a run.

    Args:
        recorded: state by the files; another one than `running` is final.
        report: state of the services (volley_python.diagnosis.observing.described).
        has_answered: the trainer has answered since the run was started.
    """
    if recorded != "running":
        return recorded
    state = report["state"]
    if state in ("finished", "failed") or (state == "stopped" and has_answered):
        return "ending"
    if state == "stopped" or (not has_answered and state != "unknown"):
        return "starting"
    if state != "wedged" and trainer(report).get("phase") in _BEFORE_STEPS:
        return "starting"
    return "running" if state == "unknown" else state


def trainer(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the trainer reports; empty if it does not answer."""
    return next((one["facts"] for one in report["services"] if one["kind"] == "trainer"), {})
