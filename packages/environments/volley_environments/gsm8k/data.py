"""GSM8K's file format: problems, the `#### number` answer, and the `<<48/2=24>>` annotations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from services.env.episode_types import Message, assistant
from shared.errors import ConfigError
from volley_environments.problem_files import read_rows
from volley_sandbox.tools.arithmetic import CalculatorError, calculate
from volley_serving.dialects.calls import CallFormat, write_call

_NUMBER = r"(?:(?<!\d)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STRICT = re.compile(rf"#### ({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)
_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
MAX_NUMBER = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the dataset. `solution` keeps its annotations; `answer` is the text after `#### `, without commas."""

    question: str
    solution: str
    answer: str


@lru_cache(maxsize=8)
def read_problems(path: Path) -> tuple[Problem, ...]:
    """Read all problems of a JSONL file, cached for the process.

    Raises ConfigError naming the file, and the line if one is malformed.
    """
    hint = "point data.train and data.eval to GSM8K's train.jsonl and test.jsonl"
    return read_rows(path, _problem, noun="problems", hint=hint)


def _problem(row: Mapping[str, Any], where: str) -> Problem:
    match row:
        case {"question": str(question), "answer": str(solution)} if (
            answer := read_number(solution, "strict")
        ) is not None:
            return Problem(question, solution, answer)
        case _:
            raise ConfigError(
                f"{where} is not a GSM8K problem", 'write lines like {"question": "…", "answer": "… #### 72"}'
            )


def read_number(text: str, mode: Literal["strict", "flexible"]) -> str | None:
    """The answer in `text` without commas: the number after the last `#### ` (strict), or the last one (flexible)."""
    found = (_STRICT if mode == "strict" else _FLEXIBLE).findall(text)
    return found[-1].replace(",", "") if found else None


def same_number(given: str, expected: str) -> bool:
    """Compare two results of `read_number` by value: 72 equals 72.0. Numbers over MAX_NUMBER characters never match."""
    if len(given) > MAX_NUMBER:
        return False
    try:
        return Decimal(given) == Decimal(expected)
    except InvalidOperation:
        return False


def solution_text(problem: Problem) -> str:
    """The dataset's solution without annotations."""
    return _ANNOTATION.sub("", problem.solution)


def solution_messages(problem: Problem, max_turns: int, form: CallFormat = "hermes") -> tuple[Message, ...]:
    """The solution as a conversation of at most `max_turns` assistant messages; each annotation is a calculator call.

    Annotations that the calculator cannot evaluate, and those beyond the turns, stay plain text.
    """
    messages: list[Message] = []
    done = 0
    text = problem.solution
    for found in _ANNOTATION.finditer(text):
        result = _result(found[1])
        if result is None or len(messages) // 2 + 1 >= max_turns:
            continue
        words = _ANNOTATION.sub("", text[done : found.start()]).strip()
        call = write_call("calculator", {"expression": found[1].strip()}, form)
        answer: Message = {"role": "tool", "content": result}
        messages += [assistant(f"{words}\n{call}".lstrip()), answer]
        done = found.end()
    return (*messages, assistant(_ANNOTATION.sub("", text[done:]).strip()))


def _result(expression: str) -> str | None:
    try:
        return calculate(expression)
    except CalculatorError:
        return None
