"""Interface to the package `reasoning-gym`; runs in a grading process (volley_sandbox/grading), never in the service.

The package's scorers expect trusted text, and nine of them evaluate the answer as Python. Here `eval` in their modules
reads literals only, and an answer for `parse_expr` is passed on only if it is plain mathematics (`is_plain`); any other
answer gets upstream's score for unparsable text.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
import re
import sys
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from shared.errors import InputError


def _sat_solver() -> types.ModuleType:
    """Module `pycosat`, which has no wheels, built on python-sat.

    One dataset lists the solutions of a formula with it.
    """
    from pysat.solvers import Minisat22

    def itersolve(clauses: Iterable[Iterable[int]]) -> Iterator[list[int]]:
        with Minisat22(bootstrap_with=clauses) as solver:
            yield from solver.enum_models()

    module = types.ModuleType("pycosat")
    vars(module)["itersolve"] = itersolve
    return module


sys.modules.setdefault("pycosat", _sat_solver())

import reasoning_gym  # noqa: E402 - it imports pycosat
from reasoning_gym.composite import DatasetSpec  # noqa: E402
from reasoning_gym.dataset import ProceduralDataset  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402

READS_LISTS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorer calls `eval` on the answer."""

PARSES_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Datasets whose scorer calls sympy's `parse_expr` on the answer, which also evaluates it.

A test compares both lists with the package's source.
"""

for _module in READS_LISTS:
    vars(importlib.import_module(f"reasoning_gym.{_module}"))["eval"] = ast.literal_eval

_EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")
"""Keys under which items hold one of several right answers."""

_FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log sqrt cbrt abs Abs erf"
_WORDS = frozenset(_FUNCTIONS.split())
_LEGAL = re.compile(r"[\w\s+\-*/^().,]{0,2000}", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MEMBER = re.compile(r"\.\s*[A-Za-z_]|__")

_UNREADABLE = "("

_warm: set[str] = set()


def names() -> list[str]:
    """All datasets."""
    return sorted(DATASETS)


def question(dataset: str, config: str, seed: int) -> tuple[str, str | None]:
    """Question of the dataset for `seed`, and the dataset's answer, if any.

    Args:
        config: the dataset's settings as JSON text.

    Raises InputError (unknown dataset, wrong settings).
    """
    item = _item(dataset, config, seed)[1]
    return item["question"], answer_of(item)


def prepare(dataset: str, config: str, seed: int) -> None:
    """Make the item, and grade a right answer. Late imports happen here, before the fork."""
    upstream, item = _item(dataset, config, seed)
    if dataset not in _warm:
        _warm.add(dataset)
        upstream.score_answer(answer_of(item) or "", item)


def score(dataset: str, config: str, seed: int, answer: str) -> float:
    """Score of `answer` by the dataset's scorer, 0 to 1. An exception of the scorer gives 0."""
    upstream, item = _item(dataset, config, seed)
    if dataset in PARSES_EXPRESSIONS and not is_plain(answer):
        answer = _UNREADABLE
    random.seed(seed)
    try:
        return float(upstream.score_answer(answer, item))
    except Exception:  # noqa: BLE001 - a scorer may raise anything on text it was not written for
        return 0.0


def is_plain(answer: str) -> bool:
    """True if `answer` contains only numbers, variables of up to two letters and well-known functions.

    Such an expression cannot name an attribute or another function.
    """
    if not _LEGAL.fullmatch(answer) or _MEMBER.search(answer):
        return False
    return all(word in _WORDS or len(word) <= 2 for word in _WORD.findall(answer))


def answer_of(item: dict[str, Any]) -> str | None:
    answer = item["answer"]
    for key in _EXAMPLES:
        answer = item["metadata"].get(key) if answer is None else answer
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


@lru_cache(maxsize=1024)
def _item(dataset: str, config: str, seed: int) -> tuple[ProceduralDataset, dict[str, Any]]:
    """The dataset made for this seed, and its only item."""
    if dataset not in DATASETS:
        raise InputError(f"reasoning-gym has no dataset {dataset!r}", f"it has: {', '.join(names())}")
    settings = json.loads(config)
    random.seed(seed)
    try:
        if dataset == "composite":
            settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", ())]
        upstream = reasoning_gym.create_dataset(dataset, **settings, seed=seed, size=1)
        return upstream, upstream[0]
    except (TypeError, ValueError, AssertionError, KeyError, IndexError) as error:
        raise InputError(f"reasoning-gym rejects dataset_config={config} for {dataset}: {error}") from error
