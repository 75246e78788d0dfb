"""Summarize a run in one sentence, from its folder and its proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.run.folder import RunFolder
from shared.visible import quoted
from volley.reporting.intervals import SuccessRate
from volley.reporting.lines import duration


def sentence(folder: RunFolder, summary: Mapping[str, Any], proof: Mapping[str, Any] | None = None) -> str:
    """Sentence on success, steps and groups.

    Args:
        summary: from `report.make`.
        proof: from `verify`, if the run was verified.
    """
    rates = [SuccessRate(**rate) for rate in summary["evaluations"]]
    parts = [*_success(rates, summary["steps"], _extent(folder.name, summary)), *_groups(folder, summary, proof)]
    flat = " All groups had equal rewards, so nothing was learned from them: see docs/debugging.md."
    return "; ".join(parts) + "." + flat * bool(summary.get("equal_rewards"))


def next_commands(folder: RunFolder) -> str:
    """Line with commands for a finished run, whose folder is relative if it lies below the working directory."""
    path = folder.path
    shown = quoted(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return f"next: volley report {shown}, volley trajectories {shown}, volley export {shown} FOLDER"


def _success(rates: Sequence[SuccessRate], steps: int, extent: str) -> list[str]:
    """Change of held-out success.

    It counts as a rise or fall only if the two intervals are disjoint, and as over the whole run only if evaluated
    before its first step and after its last.
    """
    if not rates:
        return [f"Held-out success was not measured in {extent}"]
    first, last = rates[0], rates[-1]
    if len(rates) == 1:
        return [f"Held-out success was measured once, {_interval(first)} after step {first.step}, in {extent}"]
    tasks = f"on {_counted(first.tasks, 'task')}"
    if first.tasks != last.tasks:
        tasks = f"on {first.tasks}, then {last.tasks} tasks"
    whole = (first.step, last.step) == (0, steps)
    before, after = _interval(first), str(last)
    if not whole:
        before, after = f"{before} after step {first.step}", f"{after} after step {last.step}"
    if last.low > first.high:
        change = f"rose from {before} to {after} {tasks}"
    elif last.high < first.low:
        change = f"fell from {before} to {after} {tasks}"
    elif whole:
        change = f"did not change beyond its intervals, {before} before and {after} now, {tasks},"
    else:
        change = f"did not change beyond its intervals, {before} and {after}, {tasks}"
    text = f"Held-out success {change}"
    return [f"{text} in {extent}"] if whole else [text, f"the run has taken {extent}"]


def _interval(rate: SuccessRate) -> str:
    return f"{rate.success:.1%} (95% interval {rate.low * 100:.1f}–{rate.high * 100:.1f})"


def _extent(run: str, summary: Mapping[str, Any]) -> str:
    steps, last = summary["steps"], summary["max_steps"]
    worked = f"{_counted(steps, 'step')} and {duration(summary['elapsed_sec'])}"
    if summary["finished"] or not last:
        return worked
    return f"{worked}, of {last} steps configured for run {run}"


def _groups(folder: RunFolder, summary: Mapping[str, Any], proof: Mapping[str, Any] | None) -> list[str]:
    """How the groups ended. Says "exactly once" and "none lost" only if the run was verified."""
    ends = dict(summary["tickets"] if proof is None else proof["by_disposition"])
    trained = ends.pop("trained", 0)
    others = ", ".join(f"{n} ended {end}" for end, n in sorted(ends.items()) if n)
    if proof is None:
        return [f"{_counted(trained, 'group')} trained" + (f", {others}" if others else "")]
    if (why := proof.get("not_finished")) is not None:
        return [f"the proof did not finish ({why}): run `volley verify {quoted(folder.path)}`"]
    if not proof["ok"]:
        violations = _counted(len(proof["violations"]), "violation")
        return [f"the proof FAILED with {violations}, which `volley verify {quoted(folder.path)}` names"]
    clauses = [
        f"{_counted(trained, 'group')} trained exactly once",
        *([others] if others else []),
        "none lost (verified)",
    ]
    return [", ".join(clauses)]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
