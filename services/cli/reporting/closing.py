"""What came of a run, in one sentence: only what its folder says, or what was checked just before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.cli.reporting.intervals import SuccessRate
from services.cli.reporting.lines import duration


def sentence(run: str, summary: Mapping[str, Any], proof: Mapping[str, Any] | None = None) -> str:
    """Args:
    summary: that of `report.make`.
    proof: the result of `verify`, if it was made.
    """
    parts = [f"{_success(summary)} {_extent(run, summary)}", *_groups(summary, proof)]
    return "; ".join(parts) + "."


def _success(summary: Mapping[str, Any]) -> str:
    """Rises and falls are told only where the two intervals have nothing in common."""
    rates = [SuccessRate(**rate) for rate in summary["evaluations"]]
    if not rates:
        return "Held-out success was not measured"
    first, last = rates[0], rates[-1]
    if len(rates) == 1:
        return f"Held-out success was measured once, {_interval(first)} after step {first.step},"
    tasks = f"on {first.tasks} tasks" if first.tasks == last.tasks else f"on {first.tasks}, then {last.tasks} tasks"
    if last.low > first.high:
        return f"Held-out success rose from {_interval(first)} to {last} {tasks}"
    if last.high < first.low:
        return f"Held-out success fell from {_interval(first)} to {last} {tasks}"
    return f"Held-out success did not change beyond its intervals, {_interval(first)} before and {last} now, {tasks},"


def _interval(rate: SuccessRate) -> str:
    return f"{rate.success:.1%} (95% interval {rate.low * 100:.1f}–{rate.high * 100:.1f})"


def _extent(run: str, summary: Mapping[str, Any]) -> str:
    steps, last = summary["steps"], summary["max_steps"]
    worked = f"{_counted(steps, 'step')} and {duration(summary['elapsed_sec'])}"
    if summary["finished"] or not last:
        return f"in {worked}"
    return f"in {worked}, of {last} steps that run {run} is to have"


def _groups(summary: Mapping[str, Any], proof: Mapping[str, Any] | None) -> list[str]:
    """What became of the groups; that it is so of each, once, only where it was proven."""
    ends = dict(summary["tickets"] if proof is None else proof["by_disposition"])
    trained = ends.pop("trained", 0)
    others = ", ".join(f"{n} ended {end}" for end, n in sorted(ends.items()) if n)
    if proof is None:
        return [f"{_counted(trained, 'group')} trained" + (f", {others}" if others else "")]
    if not proof["ok"]:
        return [f"the proof FAILED with {_counted(len(proof['violations']), 'violation')}, see `volley verify`"]
    told = [f"{_counted(trained, 'group')} trained exactly once", *([others] if others else []), "none lost (verified)"]
    return [", ".join(told)]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
