"""What a run shows while it goes: one plain line an optimizer step, an SFT report, an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from services.cli.reporting.jsonl import JsonlTail
from shared.run.folder import RunFolder


class ProgressDisplay:
    """Prints what the services have added to the run's files since the last call."""

    def __init__(self, folder: RunFolder, max_steps: int, say: Callable[[str], None]) -> None:
        self._tails = (
            (JsonlTail(folder.sft, from_end=True), sft_line),
            (JsonlTail(folder.metrics, from_end=True), lambda record: step_line(record, max_steps)),
            (JsonlTail(folder.evals, from_end=True), eval_line),
        )
        self.say = say

    def show(self) -> bool:
        """Whether there was anything new."""
        lines = [line(record) for tail, line in self._tails for record in tail.new()]
        for line in filter(None, lines):
            self.say(line)
        return bool(lines)


def step_line(record: Mapping[str, Any], max_steps: int) -> str:
    """One step; the keys are those of metrics.jsonl, |Δlogp| compares rollout and trainer, staleness is in steps."""
    width = len(str(max_steps))
    parts = [
        f"step {record.get('step', '?'):>{width}}/{max_steps}",
        f"loss {_number(record, 'loss', '+.4f')}",
        f"reward {_number(record, 'reward_mean', '.3f')}",
        f"success {_number(record, 'success', '.3f')}",
        f"KL {_number(record, 'kl', '.5f')}",
        f"mean |Δlogp| {_number(record, 'logprob_abs_diff', '.1e')}",
        f"{_number(record, 'tokens_per_sec', ',.0f')} tokens/s",
        f"weights {record.get('version', '?')}",
        f"staleness {_number(record, 'staleness_mean', '.1f')} (max {_number(record, 'staleness_max', '.0f')})",
    ]
    return "  ".join(parts)


def eval_line(record: Mapping[str, Any]) -> str:
    parts = [
        f"held-out after step {record.get('step', '?')}: success {_number(record, 'success', '.1%')}",
        f"reward {_number(record, 'reward_mean', '.3f')}",
        f"{record.get('n_tasks', '?')} tasks, greedy",
        f"weights {record.get('version_max', '?')}",
    ]
    return "  ".join(parts)


def sft_line(record: Mapping[str, Any]) -> str:
    """Empty for most steps: about ten lines tell the course of the warm start."""
    step, last = int(record.get("step", 0)), int(record.get("max_steps", 0))
    if step != last and step % max(1, last // 10):
        return ""
    return f"warm start (SFT) step {step}/{last}  loss {_number(record, 'loss', '.4f')}"


def _number(record: Mapping[str, Any], key: str, form: str) -> str:
    value = record.get(key)
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else "–"
