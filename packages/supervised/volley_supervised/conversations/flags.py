"""Flags that exclude a message or a row from the loss, under the names that other trainers use.

A key whose name may be such a flag is applied or refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shared.errors import InputError

FLAGS = (
    *("train", "training", "trainable", "is_trainable", "train_on_turn", "learn", "learnable", "learned"),
    *("loss", "loss_mask", "loss_weight", "loss_scale", "compute_loss", "calculate_loss", "weight"),
)
"""1 or true: learned; 0 or false: not learned."""
OPPOSITES = ("no_loss", "no_train", "no_training", "skip_loss", "ignore_loss", "exclude_from_loss")
"""1 or true: not learned; 0 or false: no effect."""
SKIP = "skip"
"""In a row, one of the opposites; in a message it may mean more than the loss."""
_VALUES = {"true": True, "1": True, "false": False, "0": False}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NAMES = re.compile(
    "(no|non|not|un|is|do|dont)?"
    "(mask|loss|train|weight|learn|skip|ignor|supervis|exclud|detach|backprop|grad(ient)?s?$|labels$)"
)


def may_say(key: str) -> bool:
    """True if a key's name may be such a flag."""
    return any(_NAMES.match(word.lower()) for word in _WORD.findall(key))


def is_learned(message: Mapping[str, Any], at: str) -> bool:
    """Return whether a message's flags let its tokens be learned. Raises InputError."""
    found = _read(message, at, OPPOSITES, _MESSAGE)
    if message["role"] != "assistant":
        if wrong := next((key for key in found if found[key]), None):
            raise InputError(f"{at} is the {message['role']}'s and has {wrong}: {message[wrong]!r}", _ONLY)
        return False
    return all(found.values())


def is_row_learned(row: Any) -> bool:
    """Return whether a row's flags let it be learned. Raises InputError."""
    return not isinstance(row, Mapping) or all(_read(row, "the row", (*OPPOSITES, SKIP), _ROW).values())


def check_parts(content: Any, at: str) -> None:
    """Raise InputError if a part of the content has a flag that excludes it from the loss."""
    for part in content if isinstance(content, list) else ():
        found = _read(part, f"a part of {at}", OPPOSITES, _MESSAGE) if isinstance(part, Mapping) else {}
        if named := next((key for key in found if not found[key]), None):
            raise InputError(
                f"{at} has a part with {named}: parts of a message cannot be excluded from the loss", _HINT
            )


def without(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the flags, for the chat template."""
    return {key: value for key, value in message.items() if key not in (*FLAGS, *OPPOSITES)}


def _read(given: Mapping[str, Any], at: str, opposites: tuple[str, ...], hint: str) -> dict[str, bool]:
    """Read the flags: true for each that lets it be learned."""
    found = dict[str, bool]()
    for key, value in given.items():
        if value is None:
            continue
        if key in FLAGS:
            found[key] = _meant(value, key, at, hint)
        elif key in opposites:
            found |= {key: False} if _meant(value, key, at, hint) else {}
        elif may_say(key):
            raise InputError(f"{at} has the flag {key}, whose meaning differs between programs", hint)
    if any(found.values()) and not all(found.values()):
        named = ", ".join(f"{key}: {given[key]!r}" for key in found)
        raise InputError(f"{at} has flags that contradict each other: {named}", hint)
    return found


def _meant(value: Any, key: str, at: str, hint: str) -> bool:
    found = _VALUES.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(found, list | dict) or found not in (0, 1):
        raise InputError(f"{at}: {key} is {repr(value)[:50]}, neither true or 1 nor false or 0", hint)
    return bool(found)


_HINT = "write train: false in a message that is not to be learned"
_MESSAGE = f"{_HINT}, and remove or rename a key that says something else"
_ROW = "write train: false in a row that is not to be learned, and drop or rename a column that says something else"
_ONLY = "only the assistant's messages are learned: remove the flag"
