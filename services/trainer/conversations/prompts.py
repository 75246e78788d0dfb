"""The prompt of a record, which its answers may repeat.

Many public data sets hold the prompt in a column of its own and again at the beginning of every answer. There it is
taken out of messages, and of the text of a pair of which both answers begin with it. Any other text that begins with
the prompt may be an answer that quotes it, and stays, as TRL leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.conversations import flags
from shared.errors import InputError

type Messages = list[dict[str, Any]]
_WORDS, _CHARACTERS = 3, 12


def divided(prompt: Messages, side: Messages, key: str) -> tuple[Messages, Messages]:
    """The prompt and the answer to it, of messages that may begin with the prompt, or with the end of it.

    Messages that begin with the assistant's are an answer as they are. Raises InputError if it cannot be told which
    messages are the prompt. Args: key: of `side`, for messages.
    """
    if not prompt or side[0]["role"] == "assistant":
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
    """Texts of the answers without the prompt, if there are several and all of them begin with it.

    Answers that are the prompt and nothing else stay, unless another one goes on after it.
    """
    goes_on = any(one.strip() != prompt.strip() for one in answers)
    if len(answers) < 2 or not goes_on or not all(repeats(prompt, one) for one in answers):
        return list(answers)
    return [one.lstrip()[len(prompt.strip()) :].lstrip() for one in answers]


def repeats(prompt: str, answer: str) -> bool:
    """Whether an answer begins with the prompt. A short prompt that is a word or two may begin one by chance."""
    prompt, answer = prompt.strip(), answer.strip()
    if not prompt or not answer.startswith(prompt):
        return False
    rest = answer[len(prompt) :]
    if not prompt[-1].isalnum():
        return True
    is_long = len(prompt.split()) >= _WORDS or len(prompt) >= _CHARACTERS
    return is_long and not rest[:1].isalnum()


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**flags.without(message), "content": message["content"].strip()}
