"""`volley report`: summary.json, a table and a plot of a run. Reads only the run's folder.

A step that a crash undid and that was trained again counts once: its last line is that of the surviving lineage. Steps
and evaluations count if the weights they made or evaluated are ancestors of the newest checkpoint's, or may still
become so.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.engines import AS_REPORTED, DeclaredEngine
from shared.errors import ConfigError, DecodeError
from shared.failure_rates import CERTAIN, TOLERATED, tail
from shared.run import commits, ledger
from shared.run.best import best_version
from shared.run.folder import RunFolder
from shared.run.pinned import MAX_STEPS, Change
from shared.run.state import TrainerState
from volley.printing import join_lines, print_lines, print_result
from volley.proof import Proof
from volley.reporting import jsonl
from volley.reporting.intervals import SuccessRate, success_rates
from volley.reporting.progress import print_text
from volley.reporting.supervised import supervised_runs
from volley.run_arguments import add_run_dir
from volley.runs.run_file import RunRecord, read_record, write_json
from volley_dashboard.report import closing, engines, environments
from volley_dashboard.report.curve import curve
from volley_python.folder import counted_lines, forks, survey

_MAIN, _UNNAMED, _ENGINE = "data.env", "main environment", "rollout.engine.kind"
_COMPONENT, _GROUP_SIZE = "reward/", "grpo_config.num_generations"

type Rows = Sequence[Mapping[str, Any]]


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir)


def main(run_dir: Path) -> int:
    """Report the run in `run_dir`. Raises ConfigError if the folder is not that of a run."""
    folder = RunFolder(run_dir.absolute())
    survey.check(folder)
    if (record := read_record(folder)) is not None and record.config.get("mode") in ("sft", "dpo"):
        return supervised_runs().report(folder)
    check(folder)
    summary = make(folder)
    print_result(summary, lambda: format_report(summary, folder))
    print_text(closing.sentence(folder, summary))
    return 0


def conclude(folder: RunFolder, summary: Mapping[str, Any], proof: Proof | None) -> None:
    """Print the report at a run's end, with its proof if there is one, and commands to go on with."""
    value = summary if proof is None else {**summary, "verify": proof.result}
    print_result(value, lambda: format_report(summary, folder))
    print_text(closing.sentence(folder, summary, None if proof is None else proof.result))
    if proof is None or proof.result["ok"]:
        print_lines(closing.next_commands(folder))


def check(folder: RunFolder) -> None:
    """Check that a folder can be reported.

    Raises ConfigError if it is not that of a run, holds files that no run writes, or has no record yet.
    """
    if not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is no folder", folder.hint())
    survey.check(folder)
    if not folder.metrics.exists() and not folder.evals.exists():
        raise ConfigError(
            f"{folder.path} has neither metrics.jsonl nor evals.jsonl",
            "give a run's folder, and wait for its first step or evaluation",
        )


def format_report(summary: Mapping[str, Any], folder: RunFolder) -> str:
    """Curve and table, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    rates = [SuccessRate(**rate) for rate in summary["evaluations"]]
    return "\n".join([*curve(rates, width), table(summary, folder, width)])


def make(folder: RunFolder) -> dict[str, Any]:
    """Write summary.json and the plot; return the summary."""
    summary, draw = read(folder)
    write_json(folder.summary, summary)
    draw()
    return summary


def read(folder: RunFolder) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the summary, and a function that draws the plot. Writes nothing."""
    head = commits.newest(folder)
    steps = by_step(counted_lines.of_steps(jsonl.read(folder.metrics), head))
    evals = environments.by_environment(counted_lines.of_weights(jsonl.read(folder.evals), head))
    lines = list(_checked(jsonl.read(folder.ledger)))
    record = read_record(folder)
    summary = summarize(steps, environments.of_main(evals), record)
    curves = environments.curves(steps, evals, _main_environment(record))
    summary |= {"tickets": dispositions(lines, head), "episodes": outcomes(steps, lines, head)}
    summary |= {"environments": [one.summary() for one in curves], "best": _best(folder, head)}
    summary |= {"engines": [_engine(one) for one in engines.read(folder, _engine_kind(record))]}
    summary |= {"forked_from": fork.origin if (fork := forks.read(folder)) else None}

    def draw() -> None:
        from volley_dashboard.report import plots

        changed = [one.from_step for one in record.amendments] if record else []
        plots.draw(folder.plot, folder.name, steps, environments.of_main(evals), changed, curves)

    return summary, draw


def by_step(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last row of each step, ordered by step."""
    last = {int(row["step"]): row for row in rows if isinstance(row.get("step"), int)}
    return [last[step] for step in sorted(last)]


def summarize(steps: Rows, evals: Rows, record: RunRecord | None) -> dict[str, Any]:
    """Figures of summary.json; None for those without data."""
    final: Mapping[str, Any] = steps[-1] if steps else {}
    before: Mapping[str, Any] = evals[0] if evals and evals[0]["step"] == 0 else {}
    after: Mapping[str, Any] = evals[-1] if evals and evals[-1]["step"] > 0 else {}
    return {
        "steps": int(final.get("step", 0)),
        "max_steps": record.config.get(MAX_STEPS) if record else None,
        "finished": record.finished if record else None,
        "failed": record.failed if record else None,
        "elapsed_sec": round(record.elapsed_s if record else _span(steps), 1),
        "held_out_success_before_rl": before.get("success"),
        "held_out_success_after_rl": after.get("success"),
        "held_out_tasks": (after or before).get("n_tasks"),
        "evaluations": [asdict(rate) for rate in success_rates(evals)],
        "final_weight_version": final.get("version"),
        "tokens_per_sec": _tokens_per_sec(steps),
        "reward_first_step": steps[0].get("reward_mean") if steps else None,
        "reward_last_step": final.get("reward_mean"),
        "reward_components": reward_components(steps),
        "kl_last_step": final.get("kl"),
        "logprob_abs_diff_mean": _mean(steps, "logprob_abs_diff"),
        "logprob_abs_diff_current_mean": _mean(steps, "logprob_abs_diff_current"),
        "staleness_max": max(
            (row["staleness_max"] for row in steps if row.get("staleness_max") is not None), default=None
        ),
        "started_from": dict(record.origin) if record and record.origin else None,
        "changed": [{"from_step": a.from_step, "changes": dict(a.changes)} for a in record.amendments]
        if record
        else [],
        "tokens_trained": sum(int(row.get("tokens") or 0) for row in steps),
        "equal_rewards": _equal_rewards(steps, record),
    }


def _equal_rewards(steps: Rows, record: RunRecord | None) -> bool:
    """Return True if every trained group has several episodes, all with the same reward, and nothing else teaches."""
    settings = record.config if record else {}
    size = settings.get(_GROUP_SIZE, 0)
    if not (isinstance(size, int) and size > 1 and steps):
        return False
    return all(row.get("zero_variance_groups") == 1 for row in steps) and _rests_on_equal_rewards(settings)


def _rests_on_equal_rewards(settings: Mapping[str, Any]) -> bool:
    from shared.algorithm_schema import any_section

    names = {key: key.removeprefix("algorithm.") for key in settings if key.startswith("algorithm.")}
    given = {name: settings[key] for key, name in names.items() if "." not in name}
    with suppress(ValidationError):
        return TypeAdapter[Any](any_section()).validate_python({"name": "grpo", **given}).rests_on_equal_rewards
    return False


def reward_components(steps: Rows) -> dict[str, list[float]]:
    """Mean of each reward component in the first and in the last step that has it."""
    found: dict[str, list[float]] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith(_COMPONENT) and isinstance(value, int | float):
                name = key.removeprefix(_COMPONENT)
                found[name] = [found[name][0] if name in found else float(value), float(value)]
    return found


def _checked(rows: Iterable[dict[str, Any]]) -> Iterator[ledger.Line]:
    """Rows that are valid ledger lines."""
    for row in rows:
        with suppress(DecodeError):
            yield ledger.checked(row)


def dispositions(lines: Iterable[ledger.Line], head: TrainerState | None = None) -> dict[str, int]:
    """Tickets by disposition along the lineage of `head`; filtered ones by rule."""
    return dict(Counter(ledger.disposition_label(line) for line in counted_lines.of_tickets(lines, head)))


def outcomes(steps: Rows, lines: Iterable[ledger.Line], head: TrainerState | None = None) -> dict[str, Any]:
    """Trained episodes by end (shares and mean sampled tokens), and counts of faults and failures."""
    episodes, tokens = Counter[str](), Counter[str]()
    faults, attempts = Counter[str](), Counter[str]()
    for row in steps:
        for end, share in (row.get("ends") or {}).items():
            episodes[end] += (n := round(share * row["episodes"]))
            tokens[end] += n * row["end_tokens"][end]
        faults.update(row.get("faults") or {})
        attempts.update(row.get("failed_attempts") or {})
    ended = counted_lines.of_tickets(lines, head)
    failed = Counter(str(line.get("reason")) for line in ended if line["disposition"] == "failed")
    return {
        "ends": {end: n / episodes.total() for end, n in episodes.most_common()},
        "end_tokens": {end: tokens[end] / n for end, n in episodes.items() if n},
        "retried_tokens": _mean(steps, "retried_tokens"),
        "faults": dict(faults.most_common()),
        "failed_attempts": dict(attempts.most_common()),
        "failed_groups": dict(failed.most_common()),
        "biased": _biased(failed, len(ended)),
    }


def _biased(failed: Counter[str], n_groups: int) -> str | None:
    """Warning if so many groups failed that the trained ones are a biased sample, else None."""
    n = failed.total()
    if n < 2 or tail(n_groups, n, TOLERATED) >= CERTAIN:
        return None
    reason, most = failed.most_common(1)[0]
    return f"{n} of {n_groups} groups failed, {most} with {reason}: training is biased where failures depend on answers"


def table(summary: Mapping[str, Any], folder: RunFolder, width: int = 80) -> str:
    before, after = summary["held_out_success_before_rl"], summary["held_out_success_after_rl"]
    gain = f"  ({(after - before) * 100:+.1f} points)" if before is not None and after is not None else ""
    rows = [
        ("optimizer steps", f"{summary['steps']}"),
        ("held-out tasks (greedy)", f"{_or_dash(summary['held_out_tasks'], '')}"),
        ("held-out success before RL", _or_dash(before, ".1%")),
        ("held-out success after RL", _or_dash(after, ".1%") + gain),
        (
            "training reward, first and last step",
            f"{_or_dash(summary['reward_first_step'], '.3f')} → {_or_dash(summary['reward_last_step'], '.3f')}",
        ),
        *_component_rows(summary["reward_components"]),
        ("mean |Δ log p|, rollout against trainer", _difference(summary)),
        ("largest staleness (steps)", _or_dash(summary["staleness_max"], ".0f")),
        ("tokens/s during RL", _or_dash(summary["tokens_per_sec"], ",.0f")),
        ("newest weights", str(summary["final_weight_version"] or "–")),
        *_best_rows(summary.get("best")),
        *_provenance_rows(summary),
        *_engine_rows(summary["engines"]),
        ("groups", _counted(summary["tickets"])),
        *environments.table_rows(summary["environments"]),
        *_outcome_rows(summary["episodes"]),
        *([("failed", str(summary["failed"]))] if summary.get("failed") else []),
        ("elapsed", f"{summary['elapsed_sec']:.1f} s"),
        *([("plot", str(folder.plot))] if folder.plot.exists() else []),
        ("summary", str(folder.summary)),
    ]
    labels = max(len(label) for label, _ in rows)
    rule = "─" * min(labels + 40, width)
    return join_lines(
        [rule, f"run {folder.name}", rule, *(f"{label:<{labels}}  {value}" for label, value in rows), rule]
    )


def _best(folder: RunFolder, head: TrainerState | None) -> dict[str, Any] | None:
    """Version with the highest held-out success; None without an evaluation or a checkpoint."""
    best = best_version(folder.evals, head.lineage, head.step) if head else None
    if best is None:
        return None
    is_kept = (folder.checkpoints / str(best.version)).is_dir()
    fields = {"version": str(best.version), "success": best.success, "kept": is_kept}
    return fields | {"tasks": best.n_tasks - best.failed, "failed": best.failed}


def _best_rows(best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if best is None:
        return []
    kept = "" if best["kept"] else ", not kept"
    failed = f" of {best['tasks']} tasks; {best['failed']} failed" if best["failed"] else ""
    return [("best weights", f"{best['version']}: {best['success']:.1%}{failed}{kept}")]


def _main_environment(record: RunRecord | None) -> str:
    """Name of the main environment, from run.json."""
    return str(record.config.get(_MAIN) or _UNNAMED) if record else _UNNAMED


def _engine_kind(record: RunRecord | None) -> str | None:
    kind = record.config.get(_ENGINE) if record else None
    return kind if isinstance(kind, str) else None


def _component_rows(components: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    parts = [f"{name} {first:.3f} → {last:.3f}" for name, (first, last) in sorted(components.items())]
    return [("components of the reward", ", ".join(parts))] if parts else []


def _provenance_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for the run that this one started from, and for changed settings, if any."""
    origin = summary["started_from"]
    rows = [("started from", f"{origin['version']} of run {origin['run']}")] if origin else []
    if (fork := summary.get("forked_from")) is not None:
        rows.append(("forked from", f"{fork['version']} of run {fork['run']}, with its log up to {fork['log_end']}"))
    for one in summary["changed"]:
        rows += [
            (f"changed from step {one['from_step']} on", str(Change(key, was, now)))
            for key, (was, now) in one["changes"].items()
        ]
    return rows


def _engine(engine: DeclaredEngine) -> dict[str, Any]:
    return {"kind": engine.kind, "lacks": [*engine.lacks], "proves_weights": engine.unproven is None}


def _engine_rows(engines: Rows) -> list[tuple[str, str]]:
    """Engines that lack a capability."""
    return [
        (
            "engine",
            f"{one['kind']}, without {', '.join(one['lacks'])}" + f"; {AS_REPORTED}" * (not one["proves_weights"]),
        )
        for one in engines
        if one["lacks"]
    ]


def _outcome_rows(episodes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for ends, faults and failures, if any."""
    lengths = episodes["end_tokens"]
    ends = ", ".join(
        f"{share:.1%} {end} ({lengths[end]:.0f} tokens)" for end, share in episodes["ends"].items() if share
    )
    rows = [("episodes by end (mean length)", ends)]
    names = {"faults": "turns with a fault", "failed_attempts": "failed attempts", "failed_groups": "failed groups"}
    rows += [(label, _counted(episodes[key])) for key, label in names.items() if episodes[key]]
    rows += [("warning", episodes.get("biased") or "")]
    return [(label, text) for label, text in rows if text]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "–"


def _tokens_per_sec(steps: Rows) -> float | None:
    """Trained tokens per second of wall time of the RL steps."""
    span, tokens = _span(steps), sum(float(row.get("tokens") or 0) for row in steps)
    return round(tokens / span, 1) if span > 0 else None


def _span(steps: Rows) -> float:
    """Seconds from the start of the first step to the end of the last."""
    return float(steps[-1]["time"]) - float(steps[0]["time"]) + float(steps[0].get("step_s") or 0.0) if steps else 0.0


def _difference(summary: Mapping[str, Any]) -> str:
    """Mean |Δ log p| of tokens of the present weights; then of all tokens, which also holds what was learnt since."""
    every, current = summary["logprob_abs_diff_mean"], summary["logprob_abs_diff_current_mean"]
    if not summary["staleness_max"]:
        return _or_dash(every, ".1e")
    older = f"{_or_dash(every, '.1e')} with tokens of older weights"
    return older if current is None else f"{current:.1e} ({older})"


def _mean(rows: Rows, key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _or_dash(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
