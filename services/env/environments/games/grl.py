"""Answers of GRL's agents: `<think>…</think><answer>Up || Right</answer>`, read and counted as GRL does.

Differences to the protocol `answer` (GRL at 91a0856, grl/agents/base_agent.py and the other agents there):
- the answer begins at the start of the text, with or without its first tag, and ends at the first closing tag;
- actions beyond the limit of the turn are cut off first, unknown ones are dropped then; numbers name actions too;
- the actions of a turn are played even if they exceed the episode's budget, which ends it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_AFTER_THOUGHT = re.compile(r"</think>\s*<answer>")
_MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")


def read_words(text: str, most: int, *, think: bool) -> list[str]:
    """Return at most `most` actions as they are written; none if the answer does not have GRL's form."""
    if think:
        opened = _AFTER_THOUGHT.search(text)
        text = text[opened.end() :] if opened is not None else ""
    body, closed, _ = text.partition("</answer>")
    if not closed:
        return []
    for mark in _MARKS:
        body = body.replace(mark, "").strip()
    return [word.strip() for word in body.split("||") if word.strip()][:most]


def write_words(words: Sequence[str], *, think: bool) -> str:
    """Text that `read_words` turns back into `words`."""
    answer = f"<answer>{' || '.join(words)}</answer>"
    return f"<think></think>{answer}" if think else answer


def numbered(names: Sequence[str], first: int) -> dict[str, str]:
    """Map the accepted spellings of actions to their names: names in lower case, and numbers from `first` on."""
    return {name.lower(): name for name in names} | {str(first + n): name for n, name in enumerate(names)}


def known_actions(words: Sequence[str], spellings: Mapping[str, str]) -> list[str]:
    """Return the names of the known words, in order."""
    return [name for word in words if (name := spellings.get(_spelling(word))) is not None]


def _spelling(word: str) -> str:
    try:
        return str(int(word))
    except ValueError:
        return word.lower()


def fill(template: str, turn_number: int, actions_remaining: int, state: str) -> str:
    """Fill the placeholders of a turn's prompt."""
    values = {"turn_number": str(turn_number), "actions_remaining": str(actions_remaining), "state": state}
    return re.sub(r"\{(turn_number|actions_remaining|state)\}", lambda found: values[found[1]], template)
