"""`volley compare`: compare runs in a table and one plot. With `--vary`, train the runs first.

Reads only the runs' folders, as `volley report` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared import config, removed_keys
from shared.errors import ConfigError
from shared.run import pinned
from shared.run.folder import RunFolder
from volley.commands import train
from volley.printing import join_lines, print_lines, print_result
from volley.reporting import jsonl
from volley.reporting.intervals import SuccessRate
from volley.run_arguments import add_trust, add_vary
from volley.runs.run_file import read_record
from volley_dashboard.report import report

_NOT_COMPARED = ("run.name",)
CONFIG = "config"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a comparison.

    `settings`: those that differ between the runs. `rates`: its evaluations, by step. `warm_start`: its last
    supervised step, or None.
    """

    name: str
    settings: Mapping[str, Any]
    rates: Sequence[SuccessRate]
    steps: int
    elapsed_s: float
    warm_start: Mapping[str, Any] | None


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", metavar="FILE.yaml", help="configuration of the runs of --vary")
    add_vary(
        parser,
        "train a run for each value of a setting, in sequence, e.g. --vary algorithm.name grpo ppo;"
        " repeatable: a run for each combination. The KEY config has files, each of which follows those of --config",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="file of the plot (default: compare-RUNS.png)")
    add_trust(parser)
    parser.add_argument("rest", nargs="*", metavar="RUN_DIR | key.path=value", help="runs, or settings for --vary")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError if only one of --config and --vary is given, and as `main`."""
    if bool(arguments.config) != bool(arguments.vary):
        raise ConfigError("--config and --vary belong together", "to compare existing runs, give their folders")
    folders = (
        varied(arguments.config, arguments.rest, arguments.vary)
        if arguments.vary
        else [Path(one) for one in arguments.rest]
    )
    return main(folders, arguments.plot)


def varied(paths: Sequence[str], overrides: Sequence[str], variations: Sequence[Sequence[str]]) -> list[Path]:
    """Train a run for each combination of values, in sequence, and return the folders.

    Finished runs are not trained again. Raises as `volley train`, and ConfigError for a variation without values.

    Args:
        variations: each a key and its values; the key `config` has files, which follow `paths`.
    """
    run = config.load(paths, overrides).config.run
    wanted = dict[Path, tuple[list[str], list[str]]]()
    for chosen in combinations(variations):
        name = "-".join([run.name, *(slug(key, value) for key, value in chosen)])
        files = [*paths, *(value for key, value in chosen if key == CONFIG)]
        settings = [*overrides, *(f"{key}={value}" for key, value in chosen if key != CONFIG), f"run.name={name}"]
        settings += [f"run.bucket={run.bucket}/{name}"] if run.bucket else []  # runs never share a bucket
        loaded = config.rooted(config.load(files, settings), Path.cwd())
        wanted[loaded.config.run.folder] = files, settings
    for folder, (files, settings) in wanted.items():
        if not train.is_finished(RunFolder(folder)) and (code := train.main(files, settings)):
            raise SystemExit(code)
    return list(wanted)


def combinations(variations: Sequence[Sequence[str]]) -> list[Sequence[tuple[str, str]]]:
    """Return each combination of values, as pairs of key and value. Raises ConfigError for a variation without values.

    Args:
        variations: each a key and its values.
    """
    for key, *values in variations:
        if not values or any("=" in value for value in (key, *values)):
            raise ConfigError(f"--vary {key} {' '.join(values)}".strip(), "give a key and its values: --vary KEY A B")
        if key in ("run.bucket", "run.name"):
            raise ConfigError(
                f"--vary {key} is not possible",
                "each variation gets a name and a bucket of its own, derived from those given",
            )
    return list(itertools.product(*[[(key, value) for value in values] for key, *values in variations]))


def main(run_dirs: Sequence[Path], plot: Path | None) -> int:
    """Print the table, and draw the plot.

    Raises ConfigError for fewer than two runs, and as `report`.
    """
    if len(run_dirs) < 2:
        raise ConfigError("there is nothing to compare", "give the folders of two runs or more, or --vary KEY A B")
    runs = compared([RunFolder(path.absolute()) for path in run_dirs])
    print_result([asdict(run) for run in runs], lambda: table(runs))
    draw(runs, plot or Path(f"compare-{'-'.join(run.name for run in runs)[:80]}.png"))
    return 0


def draw(runs: Sequence[ComparedRun], target: Path) -> None:
    """Draw the curves of runs into one picture, and say where it is."""
    from volley_dashboard.report import plots

    plots.draw_beside(target, {_label(run): run.rates for run in runs})
    print_lines(f"plot: {target}")


def compared(folders: Sequence[RunFolder]) -> list[ComparedRun]:
    """Read the runs. Raises ConfigError if a folder is not that of a run."""
    for folder in folders:
        report.check(folder)
    records = [read_record(folder) for folder in folders]
    configs = [removed_keys.without(record.config) if record else {} for record in records]
    keys = sorted({key for one in configs for key in one} - set(_NOT_COMPARED))
    differing = [key for key in keys if len({json.dumps(pinned.value_of(one, key)) for one in configs}) > 1]
    return [
        _compared(folder, {key: pinned.value_of(one, key) for key in differing})
        for folder, one in zip(folders, configs, strict=True)
    ]


def _compared(folder: RunFolder, settings: Mapping[str, Any]) -> ComparedRun:
    summary = report.make(folder)
    supervised = [{k: v for k, v in row.items() if k != "time"} for row in jsonl.read(folder.sft)]
    rates = [SuccessRate(**rate) for rate in summary["evaluations"]]
    warm_start = supervised[-1] if supervised else None
    return ComparedRun(folder.name, settings, rates, summary["steps"], summary["elapsed_sec"], warm_start)


def table(runs: Sequence[ComparedRun]) -> str:
    """Table with a row per run: held-out success before, best and after, with the 95 % interval of the last."""
    rows = [("run", "before", "best", "after", "95 % interval", "steps", "elapsed")]
    rows += [(_label(run), *_successes(run.rates, run.steps), f"{run.steps}", f"{run.elapsed_s:.0f} s") for run in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(run.warm_start for run in runs):
        are_alike = all(run.warm_start == runs[0].warm_start for run in runs)
        lines.append(f"warm start: {'the same in all' if are_alike else 'different'}")
    return join_lines([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def _successes(rates: Sequence[SuccessRate], steps: int) -> tuple[str, str, str, str]:
    """Cells of success. The last names its step, unless that is the run's last."""
    if not rates:
        return "–", "–", "–", "–"
    last, best = rates[-1], max(rates, key=lambda rate: rate.standing)
    before = f"{rates[0].success:.1%}" if rates[0].step == 0 else "–"
    after = f"{last.success:.1%}" if last.step >= steps else f"{last.success:.1%} (step {last.step})"
    return before, f"{best.success:.1%} (step {best.step})", after, f"{last.low:.1%}–{last.high:.1%}"


def _label(run: ComparedRun) -> str:
    """Name of the run, followed by its differing settings if they take at most 40 characters."""
    changed = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in run.settings.items())
    return f"{run.name} ({changed})" if changed and len(changed) <= 40 else run.name


def slug(key: str, value: str) -> str:
    """Name of a setting: `algorithm.name`, `ppo` -> ppo; `grpo_config.off_policy_steps`, `2` -> off_policy_steps-2."""
    if key == CONFIG:
        return Path(value).stem
    last = key.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._]+", "-", value if last == "name" else f"{last}-{value}").strip("-")
