"""Problems with a mathematical expression as answer, as JSONL: MATH's lines, or any with problem and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from volley_environments.math.boxed import boxed_answer
from volley_environments.problem_files import read_rows

FORMAT = (
    'write lines like {"problem": "…", "answer": "\\\\frac{1}{2}"}, or with "solution" (with \\boxed{…}) for "answer"'
)


@dataclass(frozen=True, slots=True)
class MathProblem:
    """`answer` is LaTeX without its box; `solution` ends with the boxed answer."""

    problem: str
    answer: str
    solution: str


@lru_cache(maxsize=8)
def read_math(path: Path) -> tuple[MathProblem, ...]:
    """Read all problems of a file, cached for the process. Raises ConfigError naming the file and the line."""
    return read_rows(path, _problem, noun="problems", hint="point data.train and data.eval to JSONL files")


def _problem(row: Mapping[str, Any], where: str) -> MathProblem:
    problem, solution = row.get("problem") or row.get("question"), row.get("solution")
    answer = row.get("answer")
    if answer is None and isinstance(solution, str):
        answer = boxed_answer(solution)
    if isinstance(answer, int | float):
        answer = str(answer)
    if not isinstance(problem, str) or not isinstance(answer, str) or not answer.strip():
        raise ConfigError(f"{where} is not a math problem", FORMAT)
    answer = boxed_answer(answer) or answer.strip().strip("$")
    whole = isinstance(solution, str) and boxed_answer(solution) is not None
    return MathProblem(problem, answer, str(solution) if whole else f"\\boxed{{{answer}}}")
