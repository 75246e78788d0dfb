"""The prompt of a record, which its answers may repeat.

Many public data sets hold the prompt in a column of its own and again at the beginning of every answer. It is rendered
once, and never learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InputError

type Messages = list[dict[str, Any]]
_WORDS, _CHARACTERS = 3, 12


def divided(prompt: Messages, side: Messages, key: str) -> tuple[Messages, Messages]:
    """The prompt and the answer to it, of messages that may begin with the prompt, or with the end of it.

    Raises InputError if it cannot be told which messages are the prompt. Args: key: of `side`, for messages.
    """
    if not prompt:
        return prompt, side
    told = [*map(_said, prompt)], [*map(_said, side)]
    for n in range(min(len(prompt), len(side)), 0, -1):
        if told[0][-n:] == told[1][:n]:
            return prompt, side[n:]
    for at in range(1, len(side) - len(prompt)):
        if told[1][at : at + len(prompt)] == told[0]:
            return side[: at + len(prompt)], side[at + len(prompt) :]
    if side and side[0]["role"] in ("system", "developer"):
        raise InputError(f"prompt and {key} both begin a conversation: which of them is the prompt?", _ONE)
    if side and prompt[-1]["role"] == side[0]["role"] == "user":
        raise InputError(f"the prompt ends with the user's message, and {key} begins with another one", _ONE)
    return prompt, side


_ONE = "leave out the column prompt, or begin the answer with the assistant's message"


def without_prompt(prompt: str, answers: Sequence[str]) -> list[str]:
    """Text that answers the prompt, without the prompt that it begins with.

    An answer that is the prompt and nothing else stays, unless another one goes on after it.
    """
    if not any(_repeats(prompt, one) and one.strip() != prompt.strip() for one in answers):
        return list(answers)
    return [one.lstrip()[len(prompt.strip()) :].lstrip() if _repeats(prompt, one) else one for one in answers]


def _repeats(prompt: str, answer: str) -> bool:
    """A short prompt that is a word or two may be the beginning of an answer by chance."""
    prompt, answer = prompt.strip(), answer.strip()
    if not prompt or not answer.startswith(prompt):
        return False
    rest = answer[len(prompt) :]
    if not prompt[-1].isalnum():
        return True
    is_long = len(prompt.split()) >= _WORDS or len(prompt) >= _CHARACTERS
    return is_long and not rest[:1].isalnum()


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    return message["role"], message["content"].strip(), message.get("tool_calls")
