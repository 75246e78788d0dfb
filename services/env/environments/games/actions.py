"""Reading and writing of actions in text: `<answer>Right || Down</answer>`, or the bare names.

Reading never raises: any text gives a `Reply`. Unknown names are dropped and make the reply malformed; known names
around them are still played (GRL's convention).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.env.episode_types import Fault
from services.env.grading.answers import tagged_answer

type Style = Literal["answer", "plain"]

_SEPARATORS = re.compile(r"\|\||[\s,]+")


@dataclass(frozen=True, slots=True)
class Reply:
    """Actions of one turn, canonical names in order; `fault` is the reason for a penalty, if any."""

    actions: tuple[str, ...]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class ActionProtocol:
    """`names` are the legal actions; `style` says whether they are written in an <answer> tag or alone."""

    names: tuple[str, ...]
    style: Style = "answer"
    max_per_turn: int = 1

    def read(self, text: str) -> Reply:
        """Read at most `max_per_turn` actions. The last <answer> counts; case and spaces are ignored."""
        body = tagged_answer(text) if self.style == "answer" else text
        if body is None:
            return Reply((), "format")
        words = self._words(body)
        known = {name.lower(): name for name in self.names}
        actions = tuple(known[word.lower()] for word in words if word.lower() in known)
        fault = "format" if not words else "invalid_action" if len(actions) < len(words) else None
        return Reply(actions[: self.max_per_turn], fault)

    def write(self, actions: Sequence[str]) -> str:
        """Text that `read` turns back into `actions`."""
        if self.style == "answer":
            return f"<answer>{' || '.join(actions)}</answer>"
        return " ".join(actions)

    def _words(self, body: str) -> list[str]:
        parts = body.split("||") if self.style == "answer" else _SEPARATORS.split(body)
        return [part.strip() for part in parts if part.strip()]
