"""Report of a supervised run: summary.json and a table. Reads only the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from shared.models.origin import LATEST
from shared.run.folder import RunFolder
from shared.run.state import newest_state
from shared.visible import visible
from volley.printing import join_lines
from volley.reporting import jsonl
from volley.reporting.lines import number
from volley.runs.run_file import read_record, write_json
from volley_python.folder import counted_lines
from volley_supervised.lines import OTHERS, data_line

_SHOWN = {
    "loss": ("loss, first and last step", ".4f"),
    "eval_loss": ("held-out loss, before and after", ".4f"),
    "rewards/accuracies": ("preferred as in the data", ".1%"),
    "eval_rewards/accuracies": ("held-out, preferred as in the data", ".1%"),
    "rewards/margins": ("reward margin", ".4f"),
    "eval_rewards/margins": ("held-out reward margin", ".4f"),
}
_DATA = ("examples", *OTHERS, "eval_examples", *(f"eval_{name}" for name in OTHERS))

type Rows = Sequence[Mapping[str, Any]]


def make(folder: RunFolder) -> dict[str, Any]:
    """Write and return summary.json."""
    record, head = read_record(folder), newest_state(folder.checkpoints)
    lines = counted_lines.of_steps(jsonl.read(folder.sft), head)
    by_step = {int(row["step"]): row for row in lines if isinstance(row.get("step"), int)}
    rows = [by_step[step] for step in sorted(by_step)]
    steps = [row for row in rows if "loss" in row]
    rates = [float(row["tokens_per_sec"]) for row in steps if row.get("tokens_per_sec")]
    tokens = sum(int(row.get("tokens") or 0) for row in steps)
    summary = {
        "mode": record.config.get("mode") if record else None,
        "steps": steps[-1]["step"] if steps else 0,
        "max_steps": rows[-1].get("max_steps") if rows else None,
        "epochs": rows[-1].get("epoch") if rows else None,
        "finished": record.finished if record else None,
        "elapsed_sec": round(record.elapsed_s, 1) if record else None,
        "data": {key: rows[0][key] for key in _DATA if key in rows[0]} if rows else {},
        "measures": {key: _ends(rows, key) for key in _SHOWN if any(key in row for row in rows)},
        "tokens_trained": tokens,
        "tokens_per_sec": round(median(rates), 1) if rates else None,
        "final_weight_version": str(head.version) if head else None,
    }
    write_json(folder.summary, summary)
    return summary


def format_report(summary: Mapping[str, Any], folder: RunFolder) -> str:
    """Table, and the setting that starts RL from the weights."""
    figures: Mapping[str, Sequence[float]] = summary["measures"]
    rows = [
        (
            "optimizer steps",
            f"{summary['steps']} of {summary['max_steps']} ({number(summary, 'epochs', '.2f')} epochs)",
        ),
        ("data", data_line(summary["data"])),
        *((_SHOWN[key][0], " → ".join(format(value, _SHOWN[key][1]) for value in figures[key])) for key in figures),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("tokens/s, median of the steps", number(summary, "tokens_per_sec", ",.0f")),
        ("weights", str(summary["final_weight_version"] or "–")),
        ("elapsed", f"{number(summary, 'elapsed_sec', '.1f')} s"),
        ("summary", str(folder.summary)),
    ]
    width = max(len(label) for label, _ in rows)
    rule = "─" * (width + 40)
    table = join_lines(
        [rule, f"run {folder.name}", rule, *(f"{label:<{width}}  {value}" for label, value in rows), rule]
    )
    return f"{table}\n{visible(f'RL from these weights: model.path={folder.path}@{LATEST}')}"


def _ends(rows: Rows, key: str) -> list[float]:
    """First and last value; empty without values."""
    values = [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return [values[0], values[-1]] if values else []
