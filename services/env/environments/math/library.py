"""What is asked of `math-verify`, Hugging Face's judge of LaTeX answers; runs in a grading process, not in the service.

Its own time limits use signals, which a thread of a server does not get, and expressions such as 5^{5^{5^5}} outlast
them: here the fork that grades is limited instead. Of its extractors only the one for LaTeX is used: it builds sympy
objects from a grammar, and nothing a model wrote is evaluated as Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

MAX_ANSWER = 2000
"""Characters: no right answer of a data set is longer."""

_LATEX = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)
"""The whole box or nothing: of an answer it cannot read, upstream would otherwise take a part that it can."""


def prepare(gold: str) -> None:
    """Reads the gold answer, and compares it with itself so that what sympy loads late is loaded before the fork."""
    if not _read(gold):
        return
    verify(_read(gold), _read("1"), timeout_seconds=0)


def equal(gold: str, answer: str) -> bool:
    """Whether two answers, LaTeX without their box, mean the same: number, expression, set, interval, equation, text.

    The order counts: `answer` may be more explicit than `gold`, such as x=5 for 5. Per cent signs do not count, as in
    MATH's own grader (Hendrycks et al. 2021).
    """
    if len(answer) > MAX_ANSWER:
        return False
    return bool(verify(_read(gold), _read(answer), timeout_seconds=0))


@lru_cache(maxsize=1024)
def _read(latex: str) -> list[Any]:
    latex = latex.replace("\\%", "").replace("%", "")
    return parse(f"\\boxed{{{latex}}}", _LATEX, extraction_mode="first_match", parsing_timeout=0)


def _warm_up() -> None:
    """The grammar learns its tables, and sympy loads its parts, from what they meet: once here, not in every fork."""
    for gold, answer in _USUAL:
        verify(_read(gold), _read(answer), timeout_seconds=0)


_USUAL = (
    ("\\frac{1}{2}", "\\dfrac{3}{6}+0"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2\\sqrt{2}\\pi", "-\\sqrt{8}\\cdot\\pi"),
    ("(1,2]", "[1,2)"),
    ("\\{1,2\\}", "2,1,3"),
    ("x=5", "y \\le 6"),
    ("\\text{two}", "two"),
    ("\\sin(x)+\\ln 2", "e^{x}"),
    ("7-1+1", "3.5"),
)
_warm_up()
