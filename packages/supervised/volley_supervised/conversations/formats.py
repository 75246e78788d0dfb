"""Conversion of a record of a data file to a conversation or a preference pair.

The formats are those of Hugging Face's datasets:

    {"messages": [{"role": …, "content": …}, …], "tools": […]}      the assistant's messages are learned
    {"prompt": …, "completion": …}                                  only the completion is learned
    {"prompt": …, "chosen": …, "rejected": …}, or without a prompt  a pair; the common beginning is the prompt

Prompts and completions are text (one message of the user, or of the assistant) or lists of messages; an answer that
repeats the prompt is shortened (see `prompts`). An assistant's message or a row with `train: false`, or another such
flag (see `flags`), is not learned. A row may also have `system`, `functions` and `chat_template_kwargs`. Other columns
are not used; images and sounds are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shared.errors import InputError
from shared.models.messages import parsed
from volley_serving.templates.messages import kind, read_messages, read_tools
from volley_supervised.conversations import flags
from volley_supervised.conversations.prompts import divided, repeats, without_prompt

_FORMATS = ("messages", "completion", "chosen")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_OTHERS = ("system", "tools", "functions", "chat_template_kwargs")
COLUMNS = (*_FORMATS, "rejected", "prompt", *_OTHERS, *_MEDIA)
"""Keys of a record that are read, apart from flags."""
_ARGUMENTS = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Other arguments of `apply_chat_template`, and a variable that it sets."""
_EXPECTED = "expected messages, or prompt and completion; pairs have chosen and rejected"
_UNPAIRED = "keep the good answers, and drop or rename label; or make pairs of chosen and rejected answers"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that ends with the assistant's last message.

    `learned` says for each message whether its tokens are learned. `variables` are those of the chat template.
    `repeats_prompt`: the answer began with the prompt, which was removed. `keeps_prompt`: it begins with the prompt's
    text, which was kept.
    """

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeats_prompt: bool = False
    keeps_prompt: bool = False


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Conversation
    rejected: Conversation


def conversation(record: Any) -> Conversation:
    """Convert a record to a conversation. Raises InputError."""
    found = _format(record)
    if found == "chosen":
        raise InputError("it is a preference pair", "train on pairs with mode=dpo (`volley dpo`)")
    if isinstance(record.get("label"), bool):
        raise InputError("its label says whether the answer is good: it is an unpaired preference", _UNPAIRED)
    shared = _shared(record)
    if found == "messages":
        messages = _messages(record["messages"], "messages")
        if not _begins_with(messages, record.get("prompt")):
            raise InputError("it has messages, and a prompt that they do not begin with: which is meant?", _EXPECTED)
        return _whole(_with_system(record, messages), 0, shared)
    if record.get("prompt") is None:
        raise InputError("it has a completion, but no prompt")
    prompt, (answer,), noted = _answers(record, ("completion",))
    prompt = _with_system(record, prompt)
    return _whole([*prompt, *answer], len(prompt), shared | noted)


def preference_pair(record: Any) -> PreferencePair:
    """Convert a record to a pair, whose answers may be equal: `dataset` compares their tokens. Raises InputError."""
    if _format(record) != "chosen":
        raise InputError("it is not a preference pair", "give chosen and rejected, and usually a prompt")
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if record.get(other) is None:
            raise InputError(f"it has {one}, but no {other}")
    shared = _shared(record)
    prompt, sides, noted = _answers(record, ("chosen", "rejected"))
    if prompt:
        prompt = _with_system(record, prompt)
    else:
        sides = [_with_system(record, side) for side in sides]
        n = _in_common(*sides)
        prompt, sides = sides[0][:n], [side[n:] for side in sides]
    return PreferencePair(*(_whole([*prompt, *side], len(prompt), shared | noted) for side in sides))


type _Messages = list[dict[str, Any]]


def _shared(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the tools and variables of the row's conversations. Raises InputError."""
    if media := next((key for key in _MEDIA if record.get(key)), None):
        raise InputError(f"it has {media}: images and sounds cannot be trained on", f"drop the row or its {media}")
    tools, functions = read_tools(record.get("tools")), read_tools(record.get("functions"), "functions")
    if tools and functions:
        raise InputError("it has tools and functions: which of them is meant?", "keep tools")
    given = record.get("chat_template_kwargs")
    variables = parsed(given) if isinstance(given, str) else given
    if not isinstance(variables, dict | None):
        raise InputError(f"chat_template_kwargs is {kind(variables)}, not an object")
    if wrong := next((key for key in variables or {} if key in _ARGUMENTS), None):
        raise InputError(f"chat_template_kwargs has {wrong}, which is not a variable of a chat template", "remove it")
    wrapped = [one if "function" in one else {"type": "function", "function": one} for one in functions]
    return {"tools": tools or wrapped, "variables": variables or {}}


def _with_system(record: Mapping[str, Any], messages: _Messages) -> _Messages:
    """Prepend the row's system prompt, if it has one. Raises InputError if the messages begin with another one."""
    if not record.get("system"):
        return messages
    (system,) = read_messages([{"role": "system", "content": record["system"]}], "system")
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [system, *messages]
    if messages[0]["content"].strip() != system["content"].strip():
        raise InputError("it has system, and its messages begin with another system prompt", "keep one of them")
    return messages


def _answers(record: Mapping[str, Any], keys: Sequence[str]) -> tuple[_Messages, list[_Messages], dict[str, bool]]:
    """Split a record into its prompt, empty if there is none, and the answers under `keys` without the prompt.

    Also returns `repeats_prompt` and `keeps_prompt` of `Conversation`.
    """
    given, answers = record.get("prompt"), [record[key] for key in keys]
    prompt = [] if given is None else _side(given, "user", "prompt")
    texts, keeps = answers, False
    if prompt and prompt[-1]["role"] == "user" and all(isinstance(text, str) for text in texts):
        texts = without_prompt(prompt[-1]["content"], texts)
        keeps = texts == answers and any(repeats(prompt[-1]["content"], text) for text in texts)
    sides = [_side(text, "assistant", key) for key, text in zip(keys, texts, strict=True)]
    parts = [divided(prompt, side, key) for key, side in zip(keys, sides, strict=True)]
    first = parts[0][0]
    if any(prompt != first for prompt, _ in parts):
        raise InputError(f"{' and '.join(keys)} begin with different prompts")
    divisions = [answer for _, answer in parts]
    return first, divisions, {"repeats_prompt": texts != answers or sides != divisions, "keeps_prompt": keeps}


def _begins_with(messages: _Messages, prompt: Any) -> bool:
    """True if the messages begin with the prompt, if any, perhaps after a system prompt of their own."""
    wanted, given = (
        [(one["role"], one["content"].strip()) for one in side]
        for side in ([] if prompt is None else _side(prompt, "user", "prompt"), messages)
    )
    own = 1 if given[0][0] in ("system", "developer") else 0
    return wanted in (given[: len(wanted)], given[own : own + len(wanted)])


def _in_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Count the messages that both begin with, without the assistant's last one, which is always an answer."""
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    last = [
        max((i for i, one in enumerate(side) if one["role"] == "assistant"), default=0) for side in (chosen, rejected)
    ]
    return min([*same, False].index(False), *last)


def unread(record: Any) -> list[str]:
    """Return the names of a record's columns that are not read."""
    return [key for key in record if key not in COLUMNS and not flags.may_say(key)] if isinstance(record, dict) else []


def _format(record: Any) -> str:
    if not isinstance(record, dict):
        raise InputError(f"it is {kind(record)}, not an object", _EXPECTED)
    found = [key for key in _FORMATS if record.get(key) is not None]
    if not found and record.get("rejected") is not None:
        return "chosen"
    if not found:
        keys = ", ".join(map(str, list(record)[:8])) or "nothing"
        raise InputError(f"it holds no conversation: it has {keys}", _EXPECTED)
    if found == ["messages", "chosen"] and record["messages"] == record["chosen"]:
        return "chosen"
    if len(found) > 1:
        raise InputError(f"it has {' and '.join(found)}: which of them is meant?", _EXPECTED)
    return found[0]


def _whole(messages: _Messages, first: int, others: Mapping[str, Any]) -> Conversation:
    """Make a conversation of the messages up to the assistant's last one; the assistant's from `first` on are learned.

    Args:
        others: other fields of the conversation.
    """
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if len(messages) <= first:
        raise InputError("there is no message of the assistant to learn from")
    for i, (one, following) in enumerate(pairwise(messages)):
        if one["role"] == following["role"] == "assistant":
            raise InputError(
                f"messages {i} and {i + 1} are both the assistant's", "join them, or put another message between"
            )
    if messages[0]["role"] == "assistant":
        raise InputError("it begins with the assistant's message", "begin with a message that it answers")
    are_learned = [flags.is_learned(one, f"message {i}") for i, one in enumerate(messages)]
    learned = [i >= first and one for i, one in enumerate(are_learned)]
    if not any(learned):
        raise InputError("every message of the assistant has train: false, so there is nothing to learn")
    return Conversation([flags.without(one) for one in messages], learned, **others)


def _side(value: Any, role: str, key: str) -> list[dict[str, Any]]:
    """Convert text to one message of `role`; read a list of messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, key)


def _messages(value: Any, key: str) -> _Messages:
    for i, one in enumerate(value if isinstance(value, list) else ()):
        if isinstance(one, Mapping):
            flags.check_parts(one.get("content"), f"{key}[{i}]")
    return read_messages(value, key)
