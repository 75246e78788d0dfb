"""Find the last \\boxed{…} in a text. Never raises; takes linear time."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}\\]{1,100})")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def boxed_answer(text: str) -> str | None:
    """Text inside the last \\boxed{…} (or \\fbox{…}) with balanced braces; None if there is none.

    A nested box does not count as the last one: \\boxed{1 + \\boxed{2}} gives the outer. Without any, \\boxed 5 counts,
    as in some solutions of MATH.
    """
    openings = {box.end(): True for box in _BOXED.finditer(text)}
    stack: list[int] = []
    best: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            stack.append(brace.end())
        elif brace[0] == "}" and stack:
            start = stack.pop()
            if start in openings:
                best = start, brace.start()
    if best is not None:
        return text[best[0] : best[1]]
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None
