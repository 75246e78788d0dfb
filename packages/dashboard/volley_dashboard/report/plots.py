"""Plot held-out success with 95 % intervals and training reward over optimizer steps. Needs no display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from shared.files.storage import replace
from shared.visible import visible
from volley.reporting.intervals import SuccessRate, success_rates
from volley_dashboard.report.environments import EnvironmentCurve

_HELD_OUT, _TRAIN, _CHANGED = "#1b6ca8", "#c65d21", "#777777"
_MOST_LABELS = 20
_MOST_ENVIRONMENTS = 10

type Rows = Sequence[Mapping[str, Any]]


def draw(
    path: Path,
    run: str,
    steps: Rows,
    evals: Rows,
    changed: Sequence[int],
    environments: Sequence[EnvironmentCurve],
) -> None:
    """Write a PNG of a run, of about 1200 × 900 pixels, wider with several environments.

    Args:
        steps, evals: rows of metrics.jsonl and evals.jsonl, by step; with several environments, `evals` holds those of
            the first.
        changed: steps from which on other settings were in force.
        environments: curve of each environment, if there are several.
    """
    figure = Figure(figsize=(10.5 if environments else 8, 6), dpi=150, layout="constrained")
    success, reward = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"Run {_plain(run)}: what the policy learns during RL", fontsize=13)
    _draw_success(success, steps, evals)
    _draw_reward(reward, steps)
    _draw_environments(success, reward, environments)
    for axes in (success, reward):
        for i, step in enumerate(changed):
            axes.axvline(step, color=_CHANGED, linestyle="--", linewidth=1, label=None if i else "settings changed")
        if environments:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
        else:
            axes.legend(loc="best", fontsize=9)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    replace(path, png.getvalue())  # does not follow an existing link


def _plain(text: str) -> str:
    """Escape text for matplotlib, which has no glyphs for control characters and reads `$…$` as a formula."""
    return visible(text).replace("$", r"\$")


def draw_beside(path: Path, runs: Mapping[str, Sequence[SuccessRate]]) -> None:
    """Write a PNG with the held-out success of several runs, by label, with 95 % intervals.

    About 1200 × 750 pixels.
    """
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    for i, (label, rates) in enumerate(runs.items()):
        color, x = f"C{i % 10}", [rate.step for rate in rates]
        axes.fill_between(x, [r.low for r in rates], [r.high for r in rates], color=color, alpha=0.15, linewidth=0)
        axes.plot(
            x, [r.success for r in rates], color=color, marker="o", markersize=4, linewidth=2, label=_plain(label)
        )
    axes.set(xlabel="optimizer step", ylabel="success (% of held-out tasks)", ylim=(0, 1.02))
    axes.set_title("Held-out success, with 95 % intervals (Wilson)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best", fontsize=9)
    _finish(axes)
    figure.savefig(path, format="png")


def _draw_success(axes: Any, steps: Rows, evals: Rows) -> None:
    axes.plot(*_series(steps, "success"), color=_TRAIN, alpha=0.6, linewidth=1.2, label="training episodes (sampled)")
    _draw_held_out(axes, success_rates(evals))
    axes.set(ylabel="success (% of episodes)", ylim=(0, 1.09), title="Success")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(axes)


def _draw_held_out(axes: Any, rates: Sequence[SuccessRate]) -> None:
    x, y = [rate.step for rate in rates], [rate.success for rate in rates]
    low, high = [rate.low for rate in rates], [rate.high for rate in rates]
    label = f"{rates[-1].tasks if rates else ''} held-out tasks (greedy)".strip()
    axes.fill_between(x, low, high, color=_HELD_OUT, alpha=0.18, linewidth=0, label="95% interval (Wilson)")
    axes.plot(x, y, color=_HELD_OUT, marker="o", linewidth=2, label=label)
    if len(rates) == 1:  # a band needs two points
        axes.vlines(x, low, high, color=_HELD_OUT, alpha=0.4, linewidth=4)
    for rate in rates[:: max(1, -(-len(rates) // _MOST_LABELS))]:
        place = (rate.step, rate.high)
        axes.annotate(f"{rate.success:.0%}", place, textcoords="offset points", xytext=(0, 3), ha="center", fontsize=9)


def _draw_environments(success: Any, reward: Any, environments: Sequence[EnvironmentCurve]) -> None:
    """Draw each environment in a colour: training as a dashed line in both plots, held-out success as squares."""
    for i, one in enumerate(environments[:_MOST_ENVIRONMENTS]):
        color, marker = f"C{i % 10}", "." if len(one.steps) == 1 else None
        x = [step for step, _, _ in one.steps]
        for axes, y in ((success, [share for _, _, share in one.steps]), (reward, [mean for _, mean, _ in one.steps])):
            axes.plot(x, y, color=color, marker=marker, linewidth=1, linestyle="--", label=_plain(one.env))
        if i and one.held_out:
            steps, rates = [rate.step for rate in one.held_out], [rate.success for rate in one.held_out]
            success.plot(
                steps, rates, color=color, marker="s", markersize=4, linewidth=1.5, label=f"{_plain(one.env)}, held-out"
            )


def _draw_reward(axes: Any, steps: Rows) -> None:
    x, mean = _series(steps, "reward_mean")
    axes.plot(x, mean, color=_TRAIN, linewidth=1.6, label="mean of the step's episodes")
    spread = {row["step"]: row["reward_std"] for row in steps if row.get("reward_std") is not None}
    low, high = ([m + sign * spread.get(s, 0.0) for s, m in zip(x, mean, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=_TRAIN, alpha=0.15, linewidth=0, label="± one standard deviation")
    axes.set(xlabel="optimizer step", ylabel="reward (per episode)", title="Training reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes)


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    found = [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.25)
