"""Read and write actions in text: `<answer>Right || Down</answer>`, or the bare names.

Reading never raises: any text gives a `Reply`. Unknown names are dropped and make the reply malformed; known names
around them are still played (GRL's convention).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.env.environments.games import grl
from services.env.environments.tagged_answers import tagged_answer
from services.env.episode_types import Fault

type Style = Literal["answer", "plain", "grl"]

_SEPARATORS = re.compile(r"\|\||[\s,]+")


@dataclass(frozen=True, slots=True)
class Reply:
    """Actions of one turn, canonical names in order; `fault` is the reason for a penalty, if any."""

    actions: tuple[str, ...]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class ActionProtocol:
    """`names` are the legal actions; `style` says whether they are written in an <answer> tag, alone, or as in GRL.

    In GRL's style, a thought comes before the answer if `think` is set, and actions also have numbers from `first` on;
    with `raw`, the game reads the words.
    """

    names: tuple[str, ...]
    style: Style = "answer"
    max_per_turn: int = 1
    think: bool = True
    first: int = 0
    raw: bool = False

    def read(self, text: str) -> Reply:
        """Read at most `max_per_turn` actions. The last <answer> counts; case and spaces are ignored."""
        if self.style == "grl":
            written = grl.read_words(text, self.max_per_turn, think=self.think)
            if not self.raw:
                known = grl.known_actions(written, grl.numbered(self.names, self.first))
                return Reply(tuple(known), _fault(len(written), len(known)))
            return Reply(tuple(written), _fault(len(written), len(written)))
        body = tagged_answer(text) if self.style == "answer" else text
        if body is None:
            return Reply((), "format")
        words = self._words(body)
        known = {name.lower(): name for name in self.names}
        actions = tuple(known[word.lower()] for word in words if word.lower() in known)
        return Reply(actions[: self.max_per_turn], _fault(len(words), len(actions)))

    def write(self, actions: Sequence[str]) -> str:
        """Text that `read` turns back into `actions`."""
        if self.style == "grl":
            return grl.write_words(actions, think=self.think)
        if self.style == "answer":
            return f"<answer>{' || '.join(actions)}</answer>"
        return " ".join(actions)

    def _words(self, body: str) -> list[str]:
        parts = body.split("||") if self.style == "answer" else _SEPARATORS.split(body)
        return [part.strip() for part in parts if part.strip()]


def _fault(n_words: int, n_known: int) -> Fault | None:
    return "format" if not n_words else "invalid_action" if n_known < n_words else None
