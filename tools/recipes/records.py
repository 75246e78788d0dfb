"""Recipes and their results: what the files in `recipes/NAME/` hold, and whether repeated runs agree with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.config_files import read_tree
from shared.errors import ConfigError
from volley.layout import PROJECT
from volley.reporting.intervals import wilson

RECIPES = PROJECT / "recipes"
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""
MOST_SEEDS = len(_T_95) + 1


class Recipe(BaseModel):
    """Content of `recipe.yaml`.

    `runs`: arguments of `volley`, by the run's label, in order. `{LABEL}` stands for the folder of an earlier run with
    the same seed, `{prepared}` for a file that the Python program `prepare` writes before: its path is the argument.
    `needs`: files and folders that are not in the repository, such as models and data, and how each is made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    shows: str
    prepare: str = ""
    needs: dict[str, str] = {}
    seeds: tuple[int, ...] = Field(min_length=1, max_length=MOST_SEEDS)
    runs: dict[str, str] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """Figures of one run.

    `groups`: trained ones. `evaluations`: step, success and number of tasks of each. `measures`: first and last value
    of each figure of a supervised run. `seconds`: from the command to the end of its work. `cpu_seconds`, `memory_gb`:
    of all its processes, the latter at its highest, without pages of files. `load`: mean number of runnable threads on
    the machine, including those of other programs.
    """

    label: str
    seed: int
    steps: int
    groups: int
    tokens: int
    evaluations: tuple[tuple[int, float, int], ...]
    measures: Mapping[str, tuple[float, ...]]
    staleness_max: float | None
    seconds: float
    cpu_seconds: float
    memory_gb: float
    load: float

    @property
    def before(self) -> float:
        return self.evaluations[0][1]

    @property
    def after(self) -> float:
        return self.evaluations[-1][1]

    @property
    def tasks(self) -> int:
        return self.evaluations[-1][2]


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """Mean success of the runs with one label, and the interval in which one further run lies: see `interval`."""

    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """Content of `summary.json`. `digest`: of the recipe's configuration. `results`: by label, of runs that evaluate.

    `machine`: `cpu`, `cores`, `memory_gb`. `versions`: of software. `date`: of the last run, in UTC.
    """

    digest: str
    date: str
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    results: Mapping[str, RecipeResult]
    runs: tuple[RecipeRun, ...]


_SUMMARY = TypeAdapter(RecipeSummary)


def names() -> list[str]:
    """Names of all recipes."""
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.yaml"))


def load(name: str) -> Recipe:
    """Read a recipe. Raises ConfigError."""
    if name not in names():
        raise ConfigError(f"there is no recipe {name}", f"choose one of {', '.join(names())}")
    path = RECIPES / name / "recipe.yaml"
    try:
        return Recipe.model_validate(read_tree(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def read(name: str) -> RecipeSummary:
    """Read the committed results. Raises ConfigError if there are none."""
    path = RECIPES / name / "summary.json"
    try:
        return _SUMMARY.validate_json(path.read_bytes(), strict=False)
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "make it with --write") from error


def digest(recipe: Recipe) -> str:
    """Return a hash of commands, configurations and the files and folders of the project that these name.

    Comments in YAML do not count. A folder is found by a path with a slash, such as `configs/models/quickstart`. What
    the recipe needs from elsewhere counts by its path alone.
    """
    found: dict[str, Any] = {"runs": recipe.runs}
    waiting = [recipe.prepare, *(word for command in recipe.runs.values() for word in command.split())]
    while waiting:
        word = waiting.pop().rpartition("=")[2]
        path = PROJECT / word
        if word in found or word in recipe.needs:
            continue
        if path.is_file() and path.suffix == ".yaml":
            found[word] = yaml.safe_load(path.read_text(encoding="utf-8"))
            waiting += _texts(found[word])
        elif path.is_file():
            found[word] = _hash(path)
        elif "/" in word and path.is_dir() and PROJECT in path.resolve().parents:
            files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"]
            found[word] = {str(file.relative_to(path)): _hash(file) for file in files}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def interval(successes: Sequence[float], tasks: int, further: int = 1) -> tuple[float, float]:
    """Interval in which the mean success of further runs lies, as shares between 0 and 1.

    With several runs, the 95 % prediction interval by Student's distribution over the seeds; never narrower than
    Wilson's interval of the further runs' evaluations with the mean success. With one run it is Wilson's alone, which
    does not cover differences between seeds.

    Args:
        successes: held-out success of each run, 1 to 10 of them.
        tasks: number of held-out tasks.
        further: number of further runs.
    """
    mean, n = fmean(successes), len(successes)
    low, high = wilson(round(mean * tasks * further), tasks * further)
    half = _T_95[n - 2] * stdev(successes) * (1 / further + 1 / n) ** 0.5 if n > 1 else 0.0
    return max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))


def results(runs: Sequence[RecipeRun]) -> dict[str, RecipeResult]:
    """Results by label, of the runs that evaluate."""
    return {label: _result(several) for label, several in _evaluated(runs).items()}


def _evaluated(runs: Sequence[RecipeRun]) -> dict[str, list[RecipeRun]]:
    """Runs that evaluate, by label."""
    found: dict[str, list[RecipeRun]] = {}
    for run in runs:
        if run.evaluations:
            found.setdefault(run.label, []).append(run)
    return found


def _result(runs: Sequence[RecipeRun]) -> RecipeResult:
    after = [run.after for run in runs]
    return RecipeResult(
        fmean(run.before for run in runs), fmean(after), *interval(after, min(run.tasks for run in runs))
    )


def compared(committed: RecipeSummary, runs: Sequence[RecipeRun]) -> tuple[list[str], bool]:
    """Return lines about each committed result, and whether the mean success of these runs agrees with all of them."""
    lines, agree, known, new = list[str](), True, _evaluated(committed.runs), _evaluated(runs)
    for label, result in committed.results.items():
        if not (several := new.get(label)):
            lines.append(f"{label}: no held-out success, which DIFFERS from the committed {result.after:.1%}")
            agree = False
            continue
        n, before, after = len(several), fmean(run.before for run in several), fmean(run.after for run in several)
        low, high = interval([run.after for run in known[label]], min(run.tasks for run in several), n)
        inside = low <= after <= high
        agree &= inside
        verdict = "agrees with" if inside else "DIFFERS from"
        was = f"{result.after:.1%} ({'one more run' if n == 1 else f'mean of {n} more runs'}: {low:.1%} to {high:.1%})"
        lines.append(f"{label}: held-out success {before:.1%} → {after:.1%} {verdict} the committed {was}")
        if low <= result.before <= high:
            lines.append(f"note: {label} would agree without training: {result.before:.1%} before it is inside")
    return lines, agree
