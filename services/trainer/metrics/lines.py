"""Assembly of the lines of metrics.jsonl and sft.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.trainer.groups.filters import shares_without_variance
from services.trainer.metrics.step_metrics import StepMetrics, of_components, of_environments, of_teacher
from services.trainer.metrics.supervised import SupervisedMetrics
from shared.run.chain import as_read
from shared.types import Group, WeightVersion


def step_line(
    metrics: StepMetrics, groups: Sequence[Group], seconds: Mapping[str, float], main_env: str, *, mask_truncated: bool
) -> dict[str, Any]:
    """Return an RL step's line of metrics.jsonl, as it is read back from the file.

    Args:
        groups: groups of the step.
        seconds: by part of the step, at least `step` and `wait`.
        main_env: main environment; groups of it alone get no figures by environment.
        mask_truncated: truncated episodes are outside the loss.
    """
    line = asdict(metrics)
    more = line.pop("more") | shares_without_variance(groups, mask_truncated=mask_truncated)
    more |= of_environments(groups, main_env)
    more |= of_components(groups) | of_teacher(groups)
    rate = metrics.tokens / (seconds["step"] + seconds["wait"])
    rounded = {f"{part}_s": round(took, 4) for part, took in seconds.items()}
    return as_read(line | more | {"time": time.time(), **rounded, "tokens_per_sec": round(rate, 1)})


def supervised_line(
    measured: Mapping[str, Any], version: WeightVersion, epochs: float, held_out: Mapping[str, float]
) -> dict[str, Any]:
    """Return a line of sft.jsonl of a supervised run.

    Args:
        measured: metrics of the step (see `supervised_step`), or counts of the data before the first one.
        epochs: passes over the data so far.
        held_out: metrics on held-out data, by name; empty if not evaluated.
    """
    evaluated = {f"eval_{name}": value for name, value in held_out.items()}
    return {**measured, **evaluated, "epoch": epochs, "version": str(version), "time": time.time()}


def supervised_step(metrics: SupervisedMetrics, step_s: float) -> dict[str, Any]:
    return metrics.to_line() | {"step_s": step_s, "tokens_per_sec": metrics.tokens / step_s}


def warm_start_line(metrics: SupervisedMetrics) -> dict[str, Any]:
    """Return a warm start's line of sft.jsonl."""
    return metrics.to_line() | {"time": time.time()}
