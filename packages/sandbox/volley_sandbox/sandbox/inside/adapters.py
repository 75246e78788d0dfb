"""Adapters for three ways to write an environment, chosen by the signature of `reset`; see `agents` for a fourth.

- simple: `reset(split, index, seed)` returns the first messages, `step(text)` Gymnasium's five-tuple; one class;
- gymnasium: `reset(*, seed=None, options=None)` returns (observation, info), `step(action)` the five-tuple;
- volley: `reset(split, index, seed)` returns an episode with `opening` and `step(message)`.

Any of the methods may be async. Every episode of the first two kinds has its own environment object.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from values import (
    Refused,
    check_seats,
    demonstration_of,
    digest,
    jsonable,
    messages_of,
    plain,
    seat_of,
    seats_of,
    short,
    splits_of,
    step_of,
    task_of,
    tools_of,
)

Wait = Callable[[Any], Any]

GYMNASIUM_SPLITS = {"train": 100_000, "eval": 256}
"""Splits of a gymnasium environment that declares none: any seed makes a task."""
_OPEN, _CLOSE = "<answer>", "</answer>"


def find_entry(namespace: Mapping[str, Any], module: str, entry: str | None) -> tuple[type, str]:
    """Find the class to use and its protocol. Raises Refused."""
    if entry is not None:
        found = namespace.get(entry)
        if not isinstance(found, type):
            raise Refused(f"there is no class {entry}; there are: {_classes(namespace, module) or 'none'}")
        return found, _protocol(found)
    for found in reversed(list(namespace.values())):
        if not isinstance(found, type) or found.__module__ != module or not callable(getattr(found, "reset", None)):
            continue
        if callable(getattr(found, "step", None)) or _takes_task(found) or _is_agent(found):
            return found, _protocol(found)
    known = _classes(namespace, module) or "no classes"
    raise Refused(f"no class has the methods reset and step, or reset and judge; there are: {known}")


def _classes(namespace: Mapping[str, Any], module: str) -> str:
    return ", ".join(n for n, v in namespace.items() if isinstance(v, type) and v.__module__ == module)[:500]


def _is_agent(found: type) -> bool:
    """True if a program, or somebody outside, plays its episodes."""
    given = callable(getattr(found, "run", None)) or hasattr(found, "command") or hasattr(found, "agent")
    return given and not callable(getattr(found, "step", None))


def _takes_task(found: type) -> bool:
    return {"split", "index"} <= set(_parameters(found))


def _parameters(found: type) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(found.reset).parameters  # pyrefly: ignore
    except (TypeError, ValueError, AttributeError):
        raise Refused(f"{found.__name__} has no method reset with a signature that can be read") from None


def _protocol(found: type) -> str:
    parameters = _parameters(found)
    if _is_agent(found):
        if not {"split", "index"} <= set(parameters) and len(parameters) != 4:
            raise Refused(f"{found.__name__}.reset takes ({', '.join(parameters)}); it must take (split, index, seed)")
        return "agent"
    if {"split", "index"} <= set(parameters):
        return "simple" if callable(getattr(found, "step", None)) else "volley"
    if "options" in parameters or "seed" in parameters:
        return "gymnasium"
    if len(parameters) == 4:  # self and three more, of any name
        return "simple" if callable(getattr(found, "step", None)) else "volley"
    raise Refused(
        f"{found.__name__}.reset takes ({', '.join(parameters)}); it must take (self, split, index, seed), or"
        " gymnasium's (self, *, seed=None, options=None)"
    )


class EnvironmentAdapter:
    """One environment class and at most one live episode.

    Args:
        config: arguments of its constructor.
        wait: resolves a value that may be awaitable.
    """

    protocol = "simple"

    def __init__(self, found: type, config: Mapping[str, Any], wait: Wait) -> None:
        self._class, self._config, self._wait = found, dict(config), wait
        self._environment = self._new()
        self._live: Any = None
        self._info: Any = {}  # what the last reset returned beside the observation
        self.splits = self._splits()

    def describe(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "entry": self._class.__name__,
            "splits": self.splits,
            "tools": self._tools(),
            "has_demonstration": callable(getattr(self._environment, "demonstration", None)),
        }

    def task(self, split: str, index: int) -> str:
        self._check(split, index)
        if (named := self._named(split, index)) is not None:
            return named
        return f"{split}/{index}@{digest(self._open(self._new(), split, index, 0)[1])}"

    def reset(self, split: str, index: int, seed: int) -> dict[str, Any]:
        self._check(split, index)
        self._live, opening = self._open(self._new(), split, index, seed)
        if not opening:
            raise Refused("reset returned nothing to say to the model")
        task = self._named(split, index)
        task = f"{split}/{index}@{digest(opening)}" if task is None else task
        opened = {"task": task, "messages": opening, "tools": self._tools(), "restorable": self._is_restorable()}
        if not (seats := self._seats()):
            return opened
        first = seat_of(self._info, seats, "reset") if "seat" in self._info else seats[0]
        return {**opened, "seats": seats, "seat": first}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._live is None:
            raise Refused("there is no episode to step: reset was not called, or the episode is over")
        result = self._play(self._live, message)
        if seats := self._seats():
            check_seats(result, seats)
        if result["terminated"] or result["truncated"]:
            self._live = None
        elif self._is_restorable():
            result["info"]["extra"]["snapshot"] = jsonable(self._wait(self._live.snapshot()), "what snapshot returned")
        return result

    def restore(self, snapshot: Any) -> None:
        """Let the episode that reset has begun go on from a snapshot."""
        self._wait(self._live.restore(snapshot))

    def demonstration(self, split: str, index: int) -> dict[str, Any]:
        self._check(split, index)
        shown = getattr(self._environment, "demonstration", None)
        if not callable(shown):
            raise Refused(f"{self._class.__name__} has no method demonstration")
        return {**demonstration_of(self._wait(shown(split, index))), "tools": self._tools()}

    def _is_restorable(self) -> bool:
        return all(callable(getattr(self._live, name, None)) for name in ("snapshot", "restore"))

    def _new(self) -> Any:
        return self._class(**self._config)

    def _splits(self) -> dict[str, int]:
        return splits_of(getattr(self._environment, "splits", None))

    def _tools(self) -> list[Any]:
        return tools_of(getattr(self._live, "tools", None) or getattr(self._environment, "tools", ()))

    def _seats(self) -> list[str]:
        return seats_of(getattr(self._live, "seats", None) or getattr(self._environment, "seats", ()))

    def _named(self, split: str, index: int) -> str | None:
        """The author's own id of a task; None if the class has no method `task`."""
        name = getattr(self._environment, "task", None)
        return task_of(self._wait(name(split, index))) if callable(name) else None

    def _check(self, split: str, index: int) -> None:
        if split not in self.splits:
            raise Refused(f"there is no split {split!r}; there are: {', '.join(self.splits)}")
        if not 0 <= index < self.splits[split]:
            raise Refused(f"{split} has no task {index}; indices run from 0 to {self.splits[split] - 1}")

    def _open(self, environment: Any, split: str, index: int, seed: int) -> tuple[Any, list[dict[str, Any]]]:
        """Start an episode; return it and its first messages."""
        said = self._wait(environment.reset(split, index, seed))
        self._info = {}
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], Mapping):
            said, self._info = said
        return environment, messages_of(said, "what reset returned")

    def _play(self, live: Any, message: Mapping[str, Any]) -> dict[str, Any]:
        return step_of(self._wait(live.step(message["content"])))


class VolleyAdapter(EnvironmentAdapter):
    """Adapter of a class whose `reset` returns an episode."""

    protocol = "volley"

    def _splits(self) -> dict[str, int]:
        splits = getattr(self._environment, "splits", None)
        if isinstance(splits, (list, tuple)) and callable(getattr(self._environment, "num_tasks", None)):
            splits = {name: self._wait(self._environment.num_tasks(name)) for name in splits[:32]}
        return splits_of(splits)

    def _open(self, environment: Any, split: str, index: int, seed: int) -> tuple[Any, list[dict[str, Any]]]:
        episode = self._wait(environment.reset(split, index, seed))
        if not hasattr(episode, "opening") or not callable(getattr(episode, "step", None)):
            if callable(getattr(self._class, "judge", None)):
                raise Refused(
                    f"{self._class.__name__} has judge, but neither run(base_url, api_key, model) nor command, set in"
                    " the class and not by reset"
                )
            raise Refused(
                f"reset returned {short(episode)}; an environment without a method step must return an episode with"
                " opening and step"
            )
        self._info = {"seat": episode.seat} if hasattr(episode, "seat") else {}
        return episode, messages_of(episode.opening, "the opening")

    def _play(self, live: Any, message: Mapping[str, Any]) -> dict[str, Any]:
        return step_of(self._wait(live.step(dict(message))))


class GymnasiumAdapter(EnvironmentAdapter):
    """Adapter of a class with gymnasium's `reset` and `step`. Actions are read from text, observations are text."""

    protocol = "gymnasium"

    def _new(self) -> Any:
        try:
            takes = inspect.signature(self._class).parameters
        except (TypeError, ValueError):
            takes = {}
        config = self._config
        if "render_mode" in takes and "render_mode" not in config:
            config = {**config, "render_mode": "ansi"}
        environment = self._class(**config)
        space = getattr(environment, "action_space", None)
        if space is not None and not hasattr(space, "n") and type(space).__name__ != "Text":
            raise Refused(
                f"actions of the space {type(space).__name__} cannot be read from text; use Discrete or Text, or the"
                " simple protocol"
            )
        return environment

    def _splits(self) -> dict[str, int]:
        return splits_of(getattr(self._environment, "splits", GYMNASIUM_SPLITS))

    def _open(self, environment: Any, split: str, index: int, seed: int) -> tuple[Any, list[dict[str, Any]]]:
        said = self._wait(environment.reset(seed=task_seed(split, index), options=None))
        if not isinstance(said, tuple) or len(said) != 2:
            raise Refused("gymnasium's reset must return (observation, info)")
        self._info = said[1] if isinstance(said[1], Mapping) else {}
        return environment, messages_of(self._shown(environment, said[0]), "what reset returned")

    def _play(self, live: Any, message: Mapping[str, Any]) -> dict[str, Any]:
        action, fault = self._action(live, message["content"])
        if fault is not None:
            info = {"success": False, "error": fault}
            return step_of((f"Not a valid action. {self._help(live)}", 0.0, False, False, info))
        result = self._wait(live.step(action))
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            return step_of(result)
        return step_of((self._shown(live, result[0]), *result[1:]))

    def _shown(self, environment: Any, observation: Any) -> Any:
        """The observation as text: itself, or the environment's rendering."""
        if isinstance(observation, (str, list)):
            return observation
        shown = self._wait(environment.render()) if getattr(environment, "render_mode", None) == "ansi" else None
        if isinstance(shown, str) and shown:
            return shown
        raise Refused(
            f"the observation is {short(observation)}, not text; return text, or let render() return it with"
            ' render_mode "ansi"'
        )

    def _action(self, environment: Any, text: str) -> tuple[Any, str | None]:
        """The action that a text names, or the kind of the model's mistake."""
        space = getattr(environment, "action_space", None)
        text = _answer(text).strip()
        if not hasattr(space, "n"):
            return text, None
        first, n = int(getattr(space, "start", 0)), int(plain(space.n))
        names = [str(name).casefold() for name in getattr(environment, "actions", ())]
        if not text:
            return None, "format"
        if text.casefold() in names:
            return first + names.index(text.casefold()), None
        if re.fullmatch(r"-?[0-9]{1,9}", text):
            number = int(text)
            return (number, None) if first <= number < first + n else (None, "invalid_action")
        return None, "invalid_action" if re.fullmatch(r"[\w -]{1,40}", text) else "format"

    def _help(self, environment: Any) -> str:
        names = [str(name) for name in getattr(environment, "actions", ())]
        if names:
            return f"Answer with one of: {', '.join(names)}."
        space = environment.action_space
        first = int(getattr(space, "start", 0))
        return f"Answer with a number from {first} to {first + int(plain(space.n)) - 1}."


def _answer(text: str) -> str:
    """Content of the last closed <answer>, else the whole text. Takes linear time."""
    opened = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    return text if opened < 0 else text[opened + len(_OPEN) : text.find(_CLOSE, opened)]


def task_seed(split: str, index: int) -> int:
    """Seed of a task, 31 bits; the lowest bit is the split, so training shares no seed with another split."""
    hashed = int.from_bytes(hashlib.blake2b(f"{split}/{index}".encode(), digest_size=4).digest(), "big")
    return (hashed >> 2 << 1) | (split != "train")


ADAPTERS: Mapping[str, type[EnvironmentAdapter]] = {
    "simple": EnvironmentAdapter,
    "volley": VolleyAdapter,
    "gymnasium": GymnasiumAdapter,
}
