"""One record of a data file as a conversation, or as a pair of them.

The formats are those of Hugging Face's datasets:

    {"messages": [{"role": …, "content": …}, …], "tools": […]}      all that the assistant says is learned
    {"prompt": …, "completion": …}                                  only the completion
    {"prompt": …, "chosen": …, "rejected": …}, or without a prompt  a pair; what both begin with is the prompt

Prompts and completions are text (a user's message, the assistant's) or lists of messages; a completion that begins
with the prompt has it once (see `prompts`). A message of the assistant with `train: false`, or another flag of that
meaning (see `flags`), is context and not learned. Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from services.trainer.conversations import flags
from services.trainer.conversations.prompts import divided, without_prompt
from shared.errors import InputError
from shared.models.messages import kind, read_messages, read_tools

_FORMATS = ("messages", "completion", "chosen")
COLUMNS = (*_FORMATS, "rejected", "prompt", "tools")
"""All that is looked at in a record."""
_EXPECTED = "expected messages, or prompt and completion; pairs have chosen and rejected"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` end with the assistant's last one; `learned` says of each whether its tokens are. `repeats_prompt`:
    the answer began with the prompt, which is there once now.
    """

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] = ()
    repeats_prompt: bool = False


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Conversation
    rejected: Conversation


def conversation(record: Any) -> Conversation:
    """Raises InputError naming what is wrong."""
    found = _format(record)
    if found == "chosen":
        raise InputError("it is a preference pair", "train on pairs with mode=dpo (`volley dpo`)")
    tools = read_tools(record.get("tools"))
    if found == "messages":
        if record.get("prompt") is not None:
            raise InputError("it has messages and a prompt: which of them is meant?", _EXPECTED)
        return _whole(_messages(record["messages"], "messages"), 0, tools)
    if record.get("prompt") is None:
        raise InputError("it has a completion, but no prompt")
    prompt, (answer,), repeats = _answers(record, ("completion",))
    return _whole([*prompt, *answer], len(prompt), tools, repeats)


def preference_pair(record: Any) -> PreferencePair:
    """The two may be equal: only their tokens tell (see `dataset`). Raises InputError naming what is wrong."""
    if _format(record) != "chosen":
        raise InputError("it is no preference pair", "pairs have chosen and rejected, and mostly a prompt")
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if record.get(other) is None:
            raise InputError(f"it has {one}, but no {other}")
    tools = read_tools(record.get("tools"))
    prompt, sides, repeats = _answers(record, ("chosen", "rejected"))
    if not prompt:
        n = _in_common(*sides)
        prompt, sides = sides[0][:n], [side[n:] for side in sides]
    return PreferencePair(*(_whole([*prompt, *side], len(prompt), tools, repeats) for side in sides))


type _Messages = list[dict[str, Any]]


def _answers(record: Mapping[str, Any], keys: Sequence[str]) -> tuple[_Messages, list[_Messages], bool]:
    """The prompt, empty if there is none; without it what the record has under each of `keys`; whether one of these
    began with it.
    """
    given, answers = record.get("prompt"), [record[key] for key in keys]
    prompt = [] if given is None else _side(given, "user", "prompt")
    texts = answers
    if prompt and prompt[-1]["role"] == "user" and all(isinstance(text, str) for text in texts):
        texts = without_prompt(prompt[-1]["content"], texts)
    sides = [_side(text, "assistant", key) for key, text in zip(keys, texts, strict=True)]
    parts = [divided(prompt, side, key) for key, side in zip(keys, sides, strict=True)]
    first = parts[0][0]
    if any(prompt != first for prompt, _ in parts):
        raise InputError(f"{' and '.join(keys)} begin with different prompts")
    divisions = [answer for _, answer in parts]
    return first, divisions, texts != answers or sides != divisions


def _in_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages both begin with; the last one of the assistant is an answer in any case."""
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    last = [
        max((i for i, one in enumerate(side) if one["role"] == "assistant"), default=0) for side in (chosen, rejected)
    ]
    return min([*same, False].index(False), *last)


def _format(record: Any) -> str:
    if not isinstance(record, dict):
        raise InputError(f"it is {kind(record)}, not an object", _EXPECTED)
    found = [key for key in _FORMATS if record.get(key) is not None]
    if not found and record.get("rejected") is not None:
        return "chosen"
    if not found:
        keys = ", ".join(map(str, list(record)[:8])) or "nothing"
        raise InputError(f"no conversation is in it: it has {keys}", _EXPECTED)
    if len(found) > 1:
        raise InputError(f"it has {' and '.join(found)}: which of them is meant?", _EXPECTED)
    return found[0]


def _whole(
    messages: _Messages, first: int, tools: Sequence[Mapping[str, Any]], repeats_prompt: bool = False
) -> Conversation:
    """Up to the assistant's last message; of those from number `first` on the assistant's are learned."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if len(messages) <= first:
        raise InputError("there is no message of the assistant to learn from")
    for i, (one, following) in enumerate(pairwise(messages)):
        if one["role"] == following["role"] == "assistant":
            raise InputError(
                f"messages {i} and {i + 1} are both the assistant's", "join them, or put an answer between"
            )
    if messages[0]["role"] == "assistant":
        raise InputError("it begins with the assistant", "there has to be something that it answers")
    told = [flags.is_learned(one, f"message {i}") for i, one in enumerate(messages)]
    learned = [i >= first and one for i, one in enumerate(told)]
    if not any(learned):
        raise InputError("every message of the assistant has train: false, so there is nothing to learn")
    return Conversation([flags.without(one) for one in messages], learned, tools, repeats_prompt)


def _side(value: Any, role: str, key: str) -> list[dict[str, Any]]:
    """Text as one message of `role`, or a list of messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, key)


def _messages(value: Any, key: str) -> _Messages:
    for i, one in enumerate(value if isinstance(value, list) else ()):
        if isinstance(one, Mapping):
            flags.check_parts(one.get("content"), f"{key}[{i}]")
    return read_messages(value, key)
