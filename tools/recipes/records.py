"""Recipes and their results: what the files in `recipes/NAME/` hold, and whether repeated runs agree with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


class Recipe(BaseModel):
    """Content of `recipe.yaml`.

    `runs`: arguments of `volley`, by the run's label, in order. `{LABEL}` stands for the folder of an earlier run with
    the same seed, `{prepared}` for a file that the Python program `prepare` writes before: its path is the argument.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    shows: str
    prepare: str = ""
    seeds: tuple[int, ...] = Field(min_length=1)
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
    """Return a hash of commands, configurations and the files that these name; comments in YAML do not count."""
    found: dict[str, Any] = {"runs": recipe.runs}
    waiting = [recipe.prepare, *(word for command in recipe.runs.values() for word in command.split())]
    while waiting:
        word = waiting.pop().rpartition("=")[2]
        path = PROJECT / word
        if word in found or not path.is_file():
            continue
        if path.suffix == ".yaml":
            found[word] = yaml.safe_load(path.read_text(encoding="utf-8"))
            waiting += _texts(found[word])
        else:
            found[word] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def interval(successes: Sequence[float], tasks: int) -> tuple[float, float]:
    """Interval in which the success of one further run lies, with 95 % confidence, as shares between 0 and 1.

    With several runs, the prediction interval by Student's distribution over the seeds; never narrower than Wilson's
    interval of one evaluation with the mean success.

    Args:
        successes: held-out success of each run, 1 to 10 of them.
        tasks: number of held-out tasks.
    """
    mean, n = fmean(successes), len(successes)
    low, high = wilson(round(mean * tasks), tasks)
    half = _T_95[n - 2] * stdev(successes) * (1 + 1 / n) ** 0.5 if n > 1 else 0.0
    return max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))


def results(runs: Sequence[RecipeRun]) -> dict[str, RecipeResult]:
    """Results by label, of the runs that evaluate."""
    found: dict[str, list[RecipeRun]] = {}
    for run in runs:
        if run.evaluations:
            found.setdefault(run.label, []).append(run)
    return {label: _result(several) for label, several in found.items()}


def _result(runs: Sequence[RecipeRun]) -> RecipeResult:
    after = [run.after for run in runs]
    return RecipeResult(
        fmean(run.before for run in runs), fmean(after), *interval(after, min(run.tasks for run in runs))
    )


def compared(committed: Mapping[str, RecipeResult], runs: Sequence[RecipeRun]) -> tuple[list[str], bool]:
    """Return a line for each result, and whether all agree with the committed ones."""
    lines, agree = list[str](), True
    for label, now in results(runs).items():
        known = committed[label]
        inside = known.low <= now.after <= known.high
        agree &= inside
        verdict = "agrees with" if inside else "DIFFERS from"
        was = f"{known.after:.1%} (one more run: {known.low:.1%} to {known.high:.1%})"
        lines.append(f"{label}: held-out success {now.before:.1%} → {now.after:.1%} {verdict} the committed {was}")
    return lines, agree
