"""Train and verify the runs of a recipe, and measure what they take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
from pydantic import TypeAdapter

from shared.errors import ConfigError
from shared.run.folder import RunFolder
from tools.recipes.records import Recipe, RecipeRun, RecipeSummary, digest, results
from tools.soak.samples import usage
from volley.layout import PROJECT
from volley.runs.run_file import read_record, write_json

_SAMPLE_EVERY_S = 5.0
_RUN = TypeAdapter(RecipeRun)


def commands(name: str, recipe: Recipe, seed: int, folder: Path) -> dict[str, list[str]]:
    """Arguments of `volley` for each run with a seed, by label, in order."""
    folders = {label: folder / f"{name}-{label}-{seed}" for label in recipe.runs}
    own = {label: [f"run.dir={folder}", f"run.name={path.name}", f"run.seed={seed}"] for label, path in folders.items()}
    known = {**folders, "prepared": _prepared(name, folder)}
    return {label: [*text.format_map(known).split(), *own[label]] for label, text in recipe.runs.items()}


def trained(
    name: str, recipe: Recipe, seeds: Sequence[int], folder: Path, *, whole: bool = False
) -> Iterator[RecipeRun]:
    """Train and verify each run, unless it is finished.

    The file beside a run's folder holds what its training took, and after its verification all its figures. Raises
    SystemExit if a command fails; ConfigError before all training if something is missing or a run cannot be used, with
    `whole` also one whose training was interrupted: what it took covers only its last part.
    """
    for path, source in recipe.needs.items():
        if not (PROJECT / path).exists():
            raise ConfigError(f"{name} needs {path}, which is not here", source)
    folder.mkdir(parents=True, exist_ok=True)
    made_with = digest(recipe)
    planned = [
        (RunFolder(folder / f"{name}-{label}-{seed}"), label, seed, arguments)
        for seed in seeds
        for label, arguments in commands(name, recipe, seed, folder).items()
    ]
    for run, *_ in planned:
        _check(run, made_with, whole)
    if recipe.prepare:
        subprocess.run([sys.executable, recipe.prepare, str(_prepared(name, folder))], cwd=PROJECT, check=True)
    for run, label, seed, arguments in planned:
        file = _figures(run)
        if not file.exists():
            print(f"volley {' '.join(arguments)}", flush=True)
            known = {"digest": made_with, "whole": not run.path.exists()}
            write_json(file, known | _watched(["-m", "volley", *arguments]))
        kept = orjson.loads(file.read_bytes())
        if "label" not in kept:
            kept |= _proven(run, label, seed)
            write_json(file, kept)
        yield _RUN.validate_python(kept)


def _figures(run: RunFolder) -> Path:
    return run.path.with_name(f"{run.name}.json")


def _check(run: RunFolder, made_with: str, whole: bool) -> None:
    """Raises ConfigError if the run was trained with another recipe, or what it took is unknown."""
    file, record = _figures(run), read_record(run)
    kept = orjson.loads(file.read_bytes()) if file.exists() else None
    if kept and kept["digest"] != made_with:
        raise ConfigError(f"{run.path} was trained with another recipe", f"remove {file} and the run")
    if kept is None and record is not None and record.finished:
        raise ConfigError(f"{run.path} is finished, but what it took was not measured", "remove it")
    if whole and not (kept.get("whole") if kept else not run.path.exists()):
        raise ConfigError(f"{run.path} was interrupted: what all of it took is unknown", f"remove it and {file}")


def _prepared(name: str, folder: Path) -> Path:
    return folder / f"{name}.prepared.jsonl"


def _proven(run: RunFolder, label: str, seed: int) -> dict[str, Any]:
    """Verify one run; return the figures of its record. Raises SystemExit if it is not proven."""
    if subprocess.run([sys.executable, "-m", "volley", "verify", str(run.path)], cwd=PROJECT).returncode:
        raise SystemExit(1)
    summary = orjson.loads(run.summary.read_bytes())
    return {
        "label": label,
        "seed": seed,
        "steps": summary["steps"],
        "groups": summary.get("tickets", {}).get("trained", 0),
        "tokens": summary["tokens_trained"],
        "evaluations": [(one["step"], one["success"], one["tasks"]) for one in summary.get("evaluations", ())],
        "measures": summary.get("measures", {}),
        "staleness_max": summary.get("staleness_max"),
        "seconds": summary["elapsed_sec"],
    }


def _watched(arguments: Sequence[str]) -> dict[str, float]:
    """Run Python with these arguments; return CPU seconds, most GB of memory, and the mean load.

    Raises SystemExit if the program fails.
    """
    with subprocess.Popen([sys.executable, *arguments], cwd=PROJECT) as process:
        most, loads = 0, [os.getloadavg()[0]]
        try:
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                most = max(most, sum(one.memory for one in usage({"run": process.pid}).values()))
                loads.append(os.getloadavg()[0])
                time.sleep(_SAMPLE_EVERY_S)
        except BaseException:
            process.terminate()
            raise
        process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        raise SystemExit(1)
    cpu_s = ended[2].ru_utime + ended[2].ru_stime
    return {"cpu_seconds": round(cpu_s, 1), "memory_gb": round(most / 1e9, 2), "load": round(fmean(loads), 1)}


def summarize(recipe: Recipe, runs: tuple[RecipeRun, ...], last: Path) -> RecipeSummary:
    """Summarize all runs of a recipe. The record in `last`, the folder of the last one, names date and versions."""
    record = read_record(RunFolder(last.absolute()))
    if record is None:
        raise ConfigError(f"{last} has no readable run.json", "remove it, and train it again")
    date = time.strftime("%Y-%m-%d", time.gmtime(record.created))
    return RecipeSummary(digest(recipe), date, machine(), dict(record.versions), results(runs), runs)


def machine() -> dict[str, str | int]:
    """Name of the processor, number of usable cores, and memory in GB."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 1e9)}
