"""One record of a data file as a conversation, or as a pair of them.

The formats are those of Hugging Face's datasets:

    {"messages": [{"role": …, "content": …}, …], "tools": […]}      all that the assistant says is learned
    {"prompt": …, "completion": …}                                  only the completion
    {"prompt": …, "chosen": …, "rejected": …}, or without a prompt  a pair; what both begin with is the prompt

Prompts and completions are text (a user's message, the assistant's) or lists of messages. A message of the assistant
with `train: false` or `weight: 0` is there to be answered, and not learned. Other columns are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shared.errors import InputError
from shared.models.messages import kind, read_messages, read_tools

_FORMATS = ("messages", "completion", "chosen")
COLUMNS = (*_FORMATS, "rejected", "prompt", "tools")
"""All that is looked at in a record."""
_EXPECTED = "expected messages, or prompt and completion; pairs have chosen and rejected"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` end with the assistant's last one; `learned` says of each whether its tokens are."""

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] = ()


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
        return _whole(read_messages(record["messages"], "messages"), 0, tools)
    prompt = _side(record.get("prompt"), "user", "prompt")
    return _whole([*prompt, *_side(record["completion"], "assistant", "completion")], len(prompt), tools)


def preference_pair(record: Any) -> PreferencePair:
    """Raises InputError naming what is wrong."""
    if _format(record) != "chosen":
        raise InputError("it is no preference pair", "pairs have chosen and rejected, and mostly a prompt")
    if record.get("rejected") is None:
        raise InputError("it has chosen, but no rejected")
    tools = read_tools(record.get("tools"))
    prompt = [] if record.get("prompt") is None else _side(record["prompt"], "user", "prompt")
    chosen, rejected = (_side(record[key], "assistant", key) for key in ("chosen", "rejected"))
    if not prompt:
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        n = [*same, False].index(False)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
    if chosen == rejected:
        raise InputError("chosen and rejected are the same")
    return PreferencePair(*(_whole([*prompt, *side], len(prompt), tools) for side in (chosen, rejected)))


def _format(record: Any) -> str:
    if not isinstance(record, dict):
        raise InputError(f"it is {kind(record)}, not an object", _EXPECTED)
    found = [key for key in _FORMATS if record.get(key) is not None]
    if not found:
        keys = ", ".join(map(str, list(record)[:8])) or "nothing"
        raise InputError(f"no conversation is in it: it has {keys}", _EXPECTED)
    if len(found) > 1:
        raise InputError(f"it has {' and '.join(found)}: which of them is meant?", _EXPECTED)
    return found[0]


def _whole(messages: list[dict[str, Any]], first: int, tools: Sequence[Mapping[str, Any]]) -> Conversation:
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
    learned = [i >= first and _is_learned(one, i) for i, one in enumerate(messages)]
    if not any(learned):
        raise InputError("every message of the assistant has train: false, so there is nothing to learn")
    plain = [{key: value for key, value in one.items() if key not in ("train", "weight")} for one in messages]
    return Conversation(plain, learned, tools)


def _is_learned(message: Mapping[str, Any], i: int) -> bool:
    train, weight = message.get("train"), message.get("weight")
    if train not in (None, True, False) or weight not in (None, 0, 1):
        raise InputError(f"message {i}: train is true or false, weight 0 or 1")
    return message["role"] == "assistant" and train is not False and weight != 0


def _side(value: Any, role: str, key: str) -> list[dict[str, Any]]:
    """Text as one message of `role`, or a list of messages."""
    if value is None:
        raise InputError("it has a completion, but no prompt")
    return [{"role": role, "content": value}] if isinstance(value, str) else read_messages(value, key)
