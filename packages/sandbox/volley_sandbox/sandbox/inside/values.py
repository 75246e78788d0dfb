"""Authors' return values, checked and converted for the wire.

Error messages are for the authors. The service checks all of it again, because it trusts nothing from a sandbox.
"""

from __future__ import annotations

import encodings.utf_16_le  # noqa: F401 - of `text`: later, a program may have left no descriptor to load it with
import hashlib
import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_REWARD = 1e6
MAX_MESSAGE = 1 << 20
MAX_MESSAGES = 1000
MAX_SPLITS = 16
MAX_TASKS = 2**31
MAX_ID = 200
MAX_SEATS, MAX_SEAT = 64, 64
ROLES = ("system", "user", "assistant", "tool")
FAULTS = ("format", "invalid_action", "tool")


class Refused(Exception):
    """A returned value violates the protocol; the text is for the author."""


def plain(value: Any) -> Any:
    """Convert a number of numpy to Python's; return any other value unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    return value


def messages_of(value: Any, what: str) -> list[dict[str, Any]]:
    """Chat messages from a text (a user's message; empty gives none) or a list of messages. Raises Refused."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value else []
    if not isinstance(value, (list, tuple)):
        raise Refused(f"{what} must be a text or a list of chat messages, not {type(value).__name__}")
    if len(value) > MAX_MESSAGES:
        raise Refused(f"{what} holds {len(value)} messages; the limit is {MAX_MESSAGES}")
    return [_message(message, f"{what}[{i}]") for i, message in enumerate(value)]


def _message(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(f'{what} must be a message like {{"role": "user", "content": "…"}}, not {type(value).__name__}')
    role, content, calls = value.get("role"), value.get("content"), value.get("tool_calls")
    if role not in ROLES:
        raise Refused(f"{what} has the role {short(role)}; it must be one of {', '.join(ROLES)}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Refused(f"{what} has content of type {type(content).__name__}; it must be a text")
    if len(content) > MAX_MESSAGE:
        raise Refused(f"{what} has {len(content)} characters; the limit is {MAX_MESSAGE}")
    message = {"role": str(role), "content": text(content)}
    return {**message, "tool_calls": jsonable(list(calls), what)} if calls else message


def step_of(value: Any) -> dict[str, Any]:
    """A step's answer from Gymnasium's five-tuple, or from an object with those names. Raises Refused."""
    if not isinstance(value, tuple) and hasattr(value, "messages") and hasattr(value, "reward"):
        value = (value.messages, value.reward, value.terminated, value.truncated, _info_of(value.info))
    if not isinstance(value, (tuple, list)) or len(value) != 5:
        found = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
        raise Refused(f"step must return (observation, reward, terminated, truncated, info), not {found}")
    observation, reward, terminated, truncated, info = value
    reward, terminated, truncated = (
        number(reward, "reward"),
        flag(terminated, "terminated"),
        flag(truncated, "truncated"),
    )
    messages = messages_of(observation, "the observation that step returned")
    if not messages and not terminated and not truncated:
        raise Refused("step returned no observation although the episode continues; return the next message")
    if not isinstance(info, Mapping):
        raise Refused(f"the info that step returned must be a dict, not {type(info).__name__}")
    return {
        "messages": messages,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "info": _info(dict(info), reward, terminated),
    }


def _info_of(info: Any) -> Any:
    """Dict of an object with the fields of Volley's Info."""
    if isinstance(info, Mapping) or not hasattr(info, "success"):
        return info
    known = {name: getattr(info, name) for name in ("reward_components", "success", "error") if hasattr(info, name)}
    return {**dict(getattr(info, "extra", {})), **known}


def _info(info: dict[str, Any], reward: float, terminated: bool) -> dict[str, Any]:
    components = info.pop("reward_components", None)
    success = info.pop("success", info.pop("is_success", None))
    fault = info.pop("error", None)
    if components is None:
        components = {"reward": reward}
    if not isinstance(components, Mapping) or len(components) > 64:
        raise Refused("info['reward_components'] must be a dict of at most 64 numbers")
    parts = {str(name)[:MAX_ID]: number(part, f"reward_components[{name!r}]") for name, part in components.items()}
    if not math.isclose(math.fsum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise Refused(
            f"info['reward_components'] sums to {math.fsum(parts.values()):g}, and the reward is {reward:g}:"
            " they must be equal"
        )
    if fault is not None and fault not in FAULTS:
        raise Refused(f"info['error'] is {short(fault)}; it must be one of {', '.join(FAULTS)}, or None")
    won = terminated and reward > 0 if success is None else flag(success, "info['success']")
    return {"reward_components": parts, "success": won, "error": fault, "extra": jsonable(info, "info")}


def judged_of(value: Any) -> dict[str, Any]:
    """A judgement from a reward or (reward, info), as a step's answer. Raises Refused."""
    pair = isinstance(value, (tuple, list))
    if pair and len(value) != 2:
        raise Refused(f"judge must return a reward or (reward, info), not {len(value)} values")
    reward, info = value if pair else (value, {})
    if not isinstance(info, Mapping):
        raise Refused(f"the info that judge returned must be a dict, not {type(info).__name__}")
    return step_of(("", reward, True, False, info))


def number(value: Any, what: str) -> float:
    """A finite number of at most MAX_REWARD in size. Raises Refused."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if isinstance(value, bool):
            return float(value)
        raise Refused(f"{what} must be a number, not {type(value).__name__}")
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise Refused(f"{what} is {short(value)}; it must be finite and at most {MAX_REWARD:g} in size")
    return float(value)


def flag(value: Any, what: str) -> bool:
    value = plain(value)
    if isinstance(value, (bool, int)):
        return bool(value)
    raise Refused(f"{what} must be True or False, not {type(value).__name__}")


def splits_of(value: Any) -> dict[str, int]:
    """Sizes of splits. Raises Refused."""
    if not isinstance(value, Mapping) or not value:
        raise Refused('splits must be a dict like {"train": 1000, "eval": 50}: how many tasks each split has')
    found = dict(islice(value.items(), MAX_SPLITS + 1))
    if len(found) > MAX_SPLITS:
        raise Refused(f"splits names more than {MAX_SPLITS} splits")
    for name, n in found.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID or not name.isprintable():
            raise Refused(f"{short(name)} is not the name of a split")
        if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MAX_TASKS:
            raise Refused(f"splits[{name!r}] is {short(n)}; it must be a number of tasks from 1 to {MAX_TASKS}")
    return found


def tools_of(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > 128:
        raise Refused("tools must be a list of at most 128 JSON schemas in OpenAI's shape")
    return jsonable(list(value), "tools")


def seats_of(value: Any) -> list[str]:
    """Names of the players. Raises Refused."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_SEATS or len(set(map(str, value))) < len(value):
        raise Refused(f'seats must be a list of up to {MAX_SEATS} different names, like ["first", "second"]')
    for seat in value:
        if not isinstance(seat, str) or not 0 < len(seat) <= MAX_SEAT or not seat.isprintable():
            raise Refused(f"{short(seat)} is not the name of a seat: a text of up to {MAX_SEAT} characters")
    return list(value)


def seat_of(info: Any, seats: list[str], what: str) -> str:
    """Seat whose turn it is. Raises Refused."""
    seat = info.get("seat") if isinstance(info, Mapping) else None
    if seat not in seats:
        raise Refused(
            f"info['seat'] that {what} returned is {short(seat)}; it must name the seat whose turn it is: one of"
            f" {', '.join(seats)}"
        )
    return seat


def check_seats(step: Mapping[str, Any], seats: list[str]) -> None:
    """Check that a step names the next seat, or rewards all seats at the end. Raises Refused."""
    extra = step["info"]["extra"]
    if not (step["terminated"] or step["truncated"]):
        if "rewards" in extra:
            raise Refused(
                "info['rewards'] belongs to the step that ends the episode; `reward` is of the seat that moved"
            )
        seat_of(extra, seats, "step")
        return
    rewards = extra.get("rewards")
    if not isinstance(rewards, Mapping) or set(rewards) != set(seats):
        raise Refused(
            f"info['rewards'] of the step that ended the episode is {short(rewards)}; it must be a dict with a number"
            f" for each seat: {', '.join(seats)}"
        )
    for seat, reward in rewards.items():
        number(reward, f"info['rewards'][{seat!r}]")


def task_of(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID or not value.isprintable():
        raise Refused(f"task must return a readable id of up to {MAX_ID} characters, not {short(value)}")
    return text(value)


def demonstration_of(value: Any) -> dict[str, Any]:
    """A demonstration from messages, (messages, success), or an object with those names.

    Raises Refused.
    """
    success = True
    if hasattr(value, "messages") and hasattr(value, "success"):
        value, success = value.messages, flag(value.success, "success")
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], bool):
        value, success = value
    messages = messages_of(value, "the demonstration")
    if not messages or messages[-1]["role"] != "assistant":
        raise Refused("a demonstration must be a list of chat messages that ends with the assistant's")
    return {"messages": messages, "success": success}


def digest(messages: list[dict[str, Any]]) -> str:
    """12 hex digits over the first messages of a task."""
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=6).hexdigest()


def jsonable(value: Any, what: str) -> Any:
    """`value` as JSON can represent it. Raises Refused."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_plain_or_refuse))
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{what} cannot be written as JSON: {str(error)[:200]}") from None


def _plain_or_refuse(value: Any) -> Any:
    found = plain(value)
    if found is value:
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} is not a value of JSON")
    return found


def text(value: str) -> str:
    """Text with U+FFFD for lone surrogates (like shared.text, which a sandbox does not have)."""
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def short(value: Any) -> str:
    """At most 80 characters of the representation of `value`."""
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - the value is untrusted
        return f"a {type(value).__name__} that cannot be shown"
