"""Format records as one line each: optimizer steps, supervised steps, evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shared import packages
from volley.reporting.intervals import SuccessRate


def step_line(record: Mapping[str, Any], max_steps: int) -> str:
    """Format a step of metrics.jsonl. |Δlogp| compares rollout and trainer, staleness is in steps."""
    width = len(str(max_steps))
    parts = [
        f"step {record.get('step', '?'):>{width}}/{max_steps}",
        f"loss {number(record, 'loss', '+.4f')}",
        f"reward {number(record, 'reward_mean', '.3f')}",
        f"success {number(record, 'success', '.3f')}",
        f"KL {number(record, 'kl', '.5f')}",
        f"mean |Δlogp| {number(record, 'logprob_abs_diff', '.1e')}",
        f"{number(record, 'tokens_per_sec', ',.0f')} tokens/s",
        f"weights {record.get('version', '?')}",
        f"staleness {number(record, 'staleness_mean', '.1f')} (max {number(record, 'staleness_max', '.0f')})",
    ]
    if record.get("grad_norm") == 0:
        equal = record.get("zero_variance_groups") == 1
        parts.append(f"learned nothing: {'equal rewards in each group' if equal else 'no gradient'}")
    return "  ".join(parts)


def eval_line(record: Mapping[str, Any]) -> str:
    rate = SuccessRate.of(record)
    success = number(record, "success", ".1%") if rate is None else f"{rate}"
    tasks = record.get("n_tasks", "?")
    if rate is not None and rate.tasks != tasks:  # the interval leaves out failed tasks
        tasks = f"{rate.tasks} of {tasks}"
    of = f" of {record['env']}" if record.get("env") else ""
    parts = [
        f"held-out{of} after step {record.get('step', '?')}: success {success}",
        f"reward {number(record, 'reward_mean', '.3f')}",
        f"{tasks} tasks, greedy",
        f"weights {record.get('version_max', '?')}",
    ]
    return "  ".join(parts)


def sft_line(record: Mapping[str, Any]) -> str:
    """Format a supervised step; empty for most steps, so that a run or warm start prints about ten lines."""
    step, last = int(record.get("step", 0)), int(record.get("max_steps", 0))
    if "eval_loss" not in record and step != last and step % max(1, last // 10):
        return ""
    if "version" in record:  # of a supervised run
        return packages.part("supervised.runs").line(record)
    return f"warm start (SFT) step {step}/{last}  loss {number(record, 'loss', '.4f')}"


def format_mixture(rows: Any) -> str:
    """Format a run's mixture as `frozen_lake 75%, adder@2 25%`; empty for one environment."""
    if not isinstance(rows, list) or len(rows) < 2:
        return ""
    parts = [_format_mixture_row(row) for row in rows if row.get("share") or row.get("state") == "suspended"]
    return ", ".join(parts) if len(parts) > 1 else ""


def _format_mixture_row(row: Mapping[str, Any]) -> str:
    state = row.get("state")
    marked = f" ({state})" if state in ("canary", "suspended") else ""
    return f"{row.get('env')} {row.get('share', 0):.0%}{marked}"


def number(record: Mapping[str, Any], key: str, form: str) -> str:
    value = record.get(key)
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """Format as `7.5 s`, `3 min 2 s` or `2 h 5 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
