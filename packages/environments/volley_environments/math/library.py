"""Interface to `math-verify`, Hugging Face's judge of LaTeX answers; runs in a grading process, not in the service.

The package's time limits need signals, which a server's thread does not receive, and expressions such as 5^{5^{5^5}}
outlast them; here the grading fork is limited instead. Only its LaTeX extractor is used: it builds sympy objects from a
grammar, so model-written text is never evaluated as Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

MAX_ANSWER = 2000
"""Characters of an answer; data sets have no longer right answers."""

_LATEX = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)
"""Extract the whole box or nothing: by default, upstream would take the readable part of an unreadable answer."""


def prepare(gold: str) -> None:
    """Read the gold answer, and compare it with another, so that sympy's late imports happen before the fork."""
    if not _read(gold):
        return
    verify(_read(gold), _read("1"), timeout_seconds=0)


def equal(gold: str, answer: str) -> bool:
    """True if two answers, LaTeX without their box, are equivalent: number, expression, set, interval, equation, text.

    The order matters: `answer` may be more explicit than `gold`, such as x=5 for 5. Per cent signs are ignored, as in
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
    """Compare usual expressions once, so that the grammar's tables and sympy's parts are loaded before any fork."""
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
