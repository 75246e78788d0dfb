"""Lines for people about a supervised run: its steps and its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from volley.reporting.lines import number

_FIGURES = (
    ("epoch", "epoch", ".2f"),
    ("loss", "loss", ".4f"),
    ("eval_loss", "held-out loss", ".4f"),
    ("rewards/accuracies", "accuracy", ".3f"),
    ("rewards/margins", "margin", "+.4f"),
    ("eval_rewards/accuracies", "held-out accuracy", ".3f"),
    ("tokens_per_sec", "tokens/s", ",.0f"),
)

OTHERS = {
    "dropped": "too long and dropped",
    "truncated": "too long and truncated",
    "identical": "with two identical answers and dropped",
    "without_tools": "whose tools the chat template leaves out",
    "prompt_repeated": "whose answer began with the prompt, which was removed",
    "prompt_kept": "whose answer begins with the text of the prompt, which was kept",
    "not_learned": "flagged as not to be learned",
}
"""Descriptions of examples that were dropped or changed, by key of the first line of a run."""


def step_line(record: Mapping[str, Any]) -> str:
    """Format a step of sft.jsonl, or the line before the first step."""
    step, last = int(record.get("step", 0)), int(record.get("max_steps", 0))
    parts = [f"step {step:>{len(str(last))}}/{last}"]
    parts += [] if step else [data_line(record)]
    for key, name, form in _FIGURES:
        parts += [f"{name} {number(record, key, form)}"] if key in record else []
    return "  ".join([*parts, f"weights {record['version']}"])


def data_line(record: Mapping[str, Any]) -> str:
    """Numbers of examples of a run, from its first line."""
    parts = [f"{number(record, 'examples', ',.0f')} examples", *_format_others(record, "")]
    if of_eval := _format_others(record, "eval_"):
        parts += [f"{number(record, 'eval_examples', ',.0f')} held out", *of_eval]
    return ", ".join(parts)


def _format_others(record: Mapping[str, Any], prefix: str) -> list[str]:
    found = [(record.get(f"{prefix}{key}"), words) for key, words in OTHERS.items()]
    return [f"{n:,} {words}" for n, words in found if n]
