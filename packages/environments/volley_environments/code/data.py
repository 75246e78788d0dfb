"""Programming problems as JSONL: lines of HumanEval, MBPP or APPS, or with custom tests.

A test is a program of asserts that calls the answer's functions, or a text for stdin with the expected output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from volley_environments.problem_files import read_rows

FORMAT = (
    'a line is {"question": "…", "tests": ["assert f(1) == 2", …]}, or has tests like {"input": "3\\n", "output": "9"};'
    " lines of HumanEval, MBPP and APPS work unchanged"
)


@dataclass(frozen=True, slots=True)
class Asserts:
    """A program that calls names of the answer, and raises if they are wrong."""

    program: str


@dataclass(frozen=True, slots=True)
class PrintedTest:
    """A program's stdin and its expected stdout."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """One problem.

    Args:
        question: the question in the data set's words.
        shown: tests that may be shown, as text.
        given: code available to the answer and, separately, to the tests: imports, helpers.
        setup: code that runs before the tests.
        tested: name of the required function, if the data gives it; `given` may hold its beginning.
        solution: a right answer, if there is one.
    """

    question: str
    tests: tuple[Asserts | PrintedTest, ...]
    shown: tuple[str, ...] = ()
    given: str = ""
    setup: str = ""
    tested: str = ""
    solution: str | None = None


@lru_cache(maxsize=8)
def read_code(path: Path) -> tuple[CodeProblem, ...]:
    """Read all problems of a file, cached for the process. Raises ConfigError naming the file and the line."""
    hint = "point data.train and data.eval to JSONL files of programming problems"
    return read_rows(path, _problem, noun="problems", hint=hint)


def _problem(row: Mapping[str, Any], where: str) -> CodeProblem:
    """Parse one line. Raises ConfigError."""
    try:
        match row:
            case {"prompt": str(prompt), "entry_point": str(name), "test": str(test)}:
                return _humaneval(row, prompt, name, test)
            case {"test_list": list(tests)}:
                return _mbpp(row, tests)
            case {"input_output": str() | dict()}:
                return _apps(row)
            case {"tests": list(tests)}:
                return _own(row, tests)
            case _:
                raise ValueError("it has none of the keys that hold tests")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is not a programming problem: {error}", FORMAT) from error


def _humaneval(row: Mapping[str, Any], prompt: str, name: str, test: str) -> CodeProblem:
    """HumanEval (Chen et al. 2021): a prompt that ends inside the function, and a function `check(candidate)`."""
    solution = row.get("canonical_solution")
    return CodeProblem(
        f"Complete this function, and answer with all of it:\n```python\n{prompt.rstrip()}\n```",
        (Asserts(f"{test}\ncheck({name})\n"),),
        given=prompt,
        tested=name,
        solution=None if solution is None else prompt + _text(solution, "canonical_solution"),
    )


def _mbpp(row: Mapping[str, Any], tests: Sequence[Any]) -> CodeProblem:
    """MBPP (Austin et al. 2021), both editions."""
    shown = tuple(_text(test, "test_list") for test in tests)
    hidden = tuple(_text(test, "challenge_test_list") for test in row.get("challenge_test_list") or ())
    setup = [_text(line, "test_imports") for line in row.get("test_imports") or ()]
    setup.append(_text(row.get("test_setup_code") or "", "test_setup_code"))
    solution = row.get("code")
    return CodeProblem(
        _text(row.get("text", row.get("prompt")), "text"),
        tuple(Asserts(test) for test in _some((*shown, *hidden))),
        shown=shown,
        setup="\n".join(setup),
        solution=None if solution is None else _text(solution, "code").replace("\r\n", "\n"),
    )


def _apps(row: Mapping[str, Any]) -> CodeProblem:
    """APPS (Hendrycks et al. 2021): lists of inputs and outputs; with `fn_name` they are arguments and results."""
    given = row["input_output"]
    pairs = orjson.loads(given) if isinstance(given, str) else given
    inputs, outputs = pairs["inputs"], pairs["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError("its numbers of inputs and outputs differ")
    solutions = row.get("solutions") or []
    solutions = orjson.loads(solutions) if isinstance(solutions, str) and solutions.strip() else solutions
    name = pairs.get("fn_name")
    if name is not None:
        tests: list[Asserts | PrintedTest] = [
            Asserts(f"assert {name}(*{args!r}) == {result!r}") for args, result in zip(inputs, outputs, strict=True)
        ]
    else:
        tests = [PrintedTest(_lines(text), _lines(out)) for text, out in zip(inputs, outputs, strict=True)]
    question = _text(row.get("question"), "question")
    starter = _text(row.get("starter_code") or "", "starter_code")
    question = f"{question}\nBegin with:\n```python\n{starter}\n```" if starter.strip() else question
    return CodeProblem(question, _some(tuple(tests)), solution=_text(solutions[0], "solutions") if solutions else None)


def _own(row: Mapping[str, Any], tests: Sequence[Any]) -> CodeProblem:
    found: list[Asserts | PrintedTest] = []
    for test in tests:
        match test:
            case str(program):
                found.append(Asserts(program))
            case {"input": str(stdin), "output": str(stdout)}:
                found.append(PrintedTest(stdin, stdout))
            case _:
                raise ValueError("a test is an assert as text, or {input, output}")
    solution = row.get("solution")
    return CodeProblem(
        _text(row.get("question", row.get("prompt")), "question"),
        _some(tuple(found)),
        shown=tuple(_as_text(test) for test in found),
        setup=_text(row.get("setup") or "", "setup"),
        solution=None if solution is None else _text(solution, "solution"),
    )


def _as_text(test: Asserts | PrintedTest) -> str:
    if isinstance(test, Asserts):
        return test.program
    return f"Input:\n{test.stdin.rstrip()}\nOutput:\n{test.stdout.rstrip()}"


def _lines(value: Any) -> str:
    """Text of an input or output. APPS has text or lists of lines."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else _text(value, "input_output")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    return value


def _some[T](tests: tuple[T, ...]) -> tuple[T, ...]:
    if not tests:
        raise ValueError("it has no tests")
    return tests
