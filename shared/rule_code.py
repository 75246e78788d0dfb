"""Code of the user's own rules: run once in a process from a configuration's text, called, and tried on made inputs."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from shared import own_rules
from shared.errors import ConfigError, RuleFailed
from shared.own_rules import OwnRule

_IMPORTS = "a rule may import numpy, a loss also jax, and packages of the environment of the service that calls it"

_TIMES = 3
"""Calls that have to give the same result."""
LONGEST_S = 30.0
"""Longest call of a rule beside an event loop."""


def read(value: str) -> OwnRule:
    """Read a rule from a loaded configuration. Raises RuleFailed if it holds the file's name alone."""
    try:
        return own_rules.parse(value)
    except ValueError as error:
        raise RuleFailed(str(error), "load the configuration with shared.config.load") from error


@cache
def loaded(rule: OwnRule) -> Callable[[Any], Any]:
    """Run the rule's file, once in this process, and return its function. Raises RuleFailed."""
    name = f"volley_rule_{rule.sha256[:16]}"
    module, place = ModuleType(name), f"<{rule.file} {rule.sha256[:12]}>"
    linecache.cache[place] = (len(rule.text), None, rule.text.splitlines(keepends=True), place)  # for tracebacks
    sys.modules[name] = module  # dataclasses look there
    try:
        exec(compile(rule.text, place, "exec"), module.__dict__)  # noqa: S102 the user's own file, which they named
        function = getattr(module, rule.function)
    except (Exception, SystemExit) as error:
        raise _failed(rule, error) from error
    if isinstance(function, type) or not callable(function):
        raise RuleFailed(f"{rule}: {rule.function} is not a function", "define it with def")
    return function


def called(rule: OwnRule, given: Any) -> Any:
    """Call the rule's function. Raises RuleFailed, with the line of its file, if it raises."""
    function = loaded(rule)
    try:
        return function(given)
    except (Exception, SystemExit) as error:
        raise _failed(rule, error) from error


async def in_thread[T](key: str, work: Callable[[], T]) -> T:
    """Run `work()`, which calls the rule of a configuration's key, beside the event loop. Raises RuleFailed.

    The rule may take LONGEST_S. Its thread, which nothing can stop, does not delay the end of the process.
    """
    future = Future[T]()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 the caller gets it
                future.set_exception(error)

    threading.Thread(target=run, name="rule", daemon=True).start()
    try:
        async with asyncio.timeout(LONGEST_S):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise RuleFailed(f"the rule of {key} took more than {LONGEST_S:g} s", "does it loop without an end?") from error


def checked[I, O](
    key: str, value: str, make: Callable[[OwnRule], Callable[[I], O]], given: Sequence[I]
) -> Callable[[I], O]:
    """Return the function that `make` makes of a configuration's value once it has passed. Raises ConfigError.

    It passes if it returns something usable for each of the made inputs, and the same at every call.
    """
    try:
        rule = read(value)
        function = make(rule)
        first, *more = [[function(one) for one in given] for _ in range(_TIMES)]
    except RuleFailed as error:
        raise ConfigError(f"{key}, on made data: {error.detail}", error.hint) from error
    if not all(_is_same(a, b) for again in more for a, b in zip(first, again, strict=True)):
        raise ConfigError(f"{key}: {rule} is not deterministic: two calls with the same inputs differ")
    return function


def _is_same(one: Any, other: Any) -> bool:
    """Compare results: arrays, lists of arrays, numbers by name."""
    if isinstance(one, list):
        return all(map(np.array_equal, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


def _failed(rule: OwnRule, error: BaseException) -> RuleFailed:
    """Make the error of a rule that raised: with the line of its file, and the first line of the message."""
    lines = [
        one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(f"<{rule.file}")
    ]
    where = f" at line {lines[-1]}" if lines else ""
    message = next(iter(str(error).splitlines()), "")[:300]
    hint = _IMPORTS if isinstance(error, ImportError) else ""
    return RuleFailed(f"{rule} raised {type(error).__name__}{where}: {message}", hint)
