"""Rules of the user that a configuration names by a file or an import path.

    algorithm.loss: my_loss.py:loss             a function of a file
    algorithm.advantage: my_rules.adv:centred   of a module in the present directory, or of an installed one

Invariant: a loaded configuration holds the text of the file itself, below a line with its name and its digest. So each
process, checkpoint, replay and fork of a run has the same rule, and another text is another value. No code runs here.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

LOSS, ADVANTAGE = OF_ALGORITHM = ("algorithm.loss", "algorithm.advantage")
"""Keys that make a run's algorithm `own`."""
CREDIT, FILTER, CURRICULUM = "algorithm.credit", "trainer.filters.custom", "data.curriculum.custom"
KEYS = (*OF_ALGORITHM, CREDIT, FILTER, CURRICULUM)
"""Keys of a configuration that may name a rule."""
CREDITS = ("episode", "turn")
"""Values of CREDIT that name no rule."""
MAX_BYTES = 2**15
"""Largest file: each checkpoint and each record of a step holds it."""
_HEAD = re.compile(r"# (?P<file>[^\n]{1,300}):(?P<function>[A-Za-z_]\w*) sha256=(?P<sha256>[0-9a-f]{64})\n")
MENDING = "the run keeps its rules: mend the file, and go on with `volley fork RUN_DIR --live KEY=FILE.py:FUNCTION`"
"""Advice for a rule that fails in a run."""
HINT = "name a function: my_rule.py:FUNCTION or package.module:FUNCTION"


class OwnRule(NamedTuple):
    """A rule in a configuration: the name of its file or module, its function, and the file's digest and text."""

    file: str
    function: str
    sha256: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function} (sha256 {self.sha256[:12]}…)"


def is_text(value: Any) -> bool:
    """True for a rule's text, and false for the name of its file."""
    return isinstance(value, str) and "\n" in value


def parse(value: str) -> OwnRule:
    """Read a rule from a loaded configuration. Raises ValueError if its text is not that of its digest."""
    head = _HEAD.match(value)
    if head is None:
        raise ValueError(f"{value[:200]!r} is not the text of a rule below its name and digest: {HINT}")
    made = OwnRule(**head.groupdict(), text=value[head.end() :])
    if (found := digest(made.text)) != made.sha256:
        raise ValueError(f"the text of {made.file} has the sha256 {found}, and not {made.sha256}")
    return made


def checked(value: str) -> str:
    """Return the name or the text of a rule. Raises ValueError as `parse`."""
    if is_text(value):
        parse(value)
    return value


def shown(value: Any) -> str | None:
    """Describe the text of a rule in one line; None for any other value."""
    head = _HEAD.match(value) if is_text(value) else None
    return None if head is None else str(OwnRule(**head.groupdict(), text=""))


def digest(text: str) -> str:
    """Return the SHA-256 of a rule's text."""
    return hashlib.sha256(text.encode()).hexdigest()
