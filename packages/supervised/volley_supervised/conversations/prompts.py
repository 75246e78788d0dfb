"""Removal of prompts that the answers of a record repeat.

Many public data sets have the prompt in its own column and again at the beginning of every answer. It is removed from
answers that are messages, and from a pair's texts if both begin with it. Any other text that begins with the prompt may
quote it, and is kept, as in TRL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InputError
from volley_supervised.conversations import flags

type Messages = list[dict[str, Any]]
_WORDS, _CHARACTERS = 3, 12


def divided(prompt: Messages, side: Messages, key: str) -> tuple[Messages, Messages]:
    """Split messages that may begin with the prompt, or with its end, into prompt and answer.

    Messages that begin with the assistant's are an answer. Raises InputError if the prompt is ambiguous; its message
    names `key`.
    """
    if not prompt or side[0]["role"] == "assistant":
        return prompt, side
    bare = [*map(_without_flags, prompt)], [*map(_without_flags, side)]
    for n in range(min(len(prompt), len(side)), 0, -1):
        if bare[0][-n:] == bare[1][:n]:
            return prompt, side[n:]
    for at in range(1, len(side) - len(prompt)):
        if bare[1][at : at + len(prompt)] == bare[0]:
            return side[: at + len(prompt)], side[at + len(prompt) :]
    if side and side[0]["role"] in ("system", "developer"):
        raise InputError(f"both `prompt` and `{key}` start a conversation", _ONE)
    if side and prompt[-1]["role"] == side[0]["role"] == "user":
        raise InputError(f"the prompt ends with the user's message, and {key} begins with another one", _ONE)
    return prompt, side


_ONE = "remove the column prompt, or begin the answer with the assistant's message"


def without_prompt(prompt: str, answers: Sequence[str]) -> list[str]:
    """Remove the prompt from the answers' texts, if there are several and all begin with it.

    Answers that consist only of the prompt are kept, unless another one continues after it.
    """
    goes_on = any(one.strip() != prompt.strip() for one in answers)
    if len(answers) < 2 or not goes_on or not all(repeats(prompt, one) for one in answers):
        return list(answers)
    return [one.lstrip()[len(prompt.strip()) :].lstrip() for one in answers]


def repeats(prompt: str, answer: str) -> bool:
    """True if an answer begins with the prompt; a prompt of a word or two may begin one by chance."""
    prompt, answer = prompt.strip(), answer.strip()
    if not prompt or not answer.startswith(prompt):
        return False
    rest = answer[len(prompt) :]
    if not prompt[-1].isalnum():
        return True
    is_long = len(prompt.split()) >= _WORDS or len(prompt) >= _CHARACTERS
    return is_long and not rest[:1].isalnum()


def _without_flags(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**flags.without(message), "content": message["content"].strip()}
