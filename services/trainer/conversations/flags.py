"""Flags of a message that take it out of the loss, under the names that other trainers use.

A flag that this module knows is honoured or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import InputError

FLAGS = ("train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight", "weight")
"""All of them: 1 or true means that the message is learned, 0 or false that it is not."""
_UNCLEAR = ("mask", "masked", "ignore", "train_detail", "training_detail")
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def is_learned(message: Mapping[str, Any], at: str) -> bool:
    """Read from the flags of a message if its tokens are learned. Raises InputError."""
    found = {key: _meant(message[key], key, at) for key in FLAGS if message.get(key) is not None}
    if unclear := next((key for key in _UNCLEAR if message.get(key) is not None), None):
        raise InputError(f"{at} has the flag {unclear}, whose meaning differs between programs", _HINT)
    if any(found.values()) and not all(found.values()):
        told = ", ".join(f"{key}: {message[key]!r}" for key in found)
        raise InputError(f"{at} has flags that contradict each other: {told}", _HINT)
    if message["role"] != "assistant":
        if any(found.values()):
            told = next(iter(found))
            raise InputError(f"{at} is the {message['role']}'s and has {told}: {message[told]!r}", _ONLY)
        return False
    return all(found.values())


def check_parts(content: Any, at: str) -> None:
    """Raises InputError if a part of the content has a flag that takes it out of the loss."""
    for part in content if isinstance(content, list) else ():
        named = [key for key in (*FLAGS, *_UNCLEAR) if isinstance(part, Mapping) and part.get(key) is not None]
        if any(key in _UNCLEAR or not _meant(part[key], key, at) for key in named):
            raise InputError(
                f"{at} has a part with {named[0]}: parts of a message cannot be left out of the loss", _HINT
            )


def without(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the chat template sees it."""
    return {key: value for key, value in message.items() if key not in (*FLAGS, *_UNCLEAR)}


def _meant(value: Any, key: str, at: str) -> bool:
    found = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(found, list | dict) or found not in (0, 1):
        raise InputError(f"{at}: {key} is {repr(value)[:50]}, neither true or 1 nor false or 0", _HINT)
    return bool(found)


_HINT = "write train: false in a message that is not to be learned"
_ONLY = "only what the assistant says is learned: remove the flag"
