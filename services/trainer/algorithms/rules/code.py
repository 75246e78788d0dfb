"""Functions of the user's own: loaded from a configuration's text, called, and their results checked at every call."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.rules.inputs import GroupInputs
from services.trainer.algorithms.terms.surrogate import Tokens
from shared import own_rules
from shared.errors import RuleFailed
from shared.own_rules import OwnRule

type LossFunction = Callable[[Tokens], jax.Array]
type AdvantageFunction = Callable[[GroupInputs], list[np.ndarray]]


def loss_of(rule: OwnRule) -> LossFunction:
    """Return the loss: float [B, T] of each token, before its mask and weight. Raises RuleFailed, as does the loss."""
    function = _loaded(rule)

    def loss(tokens: Tokens) -> jax.Array:
        made: Any = _called(rule, function, tokens)
        shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
        if shape != tokens.mask.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            found = type(made).__name__ if shape is None else f"{dtype} {list(shape)}"
            raise RuleFailed(f"{rule} returned {found}", f"return float32 {list(tokens.mask.shape)}: a loss per token")
        return made.astype(jnp.float32)

    return loss


def advantage_of(rule: OwnRule) -> AdvantageFunction:
    """Return the advantages of a group, float64 [N] of each episode, not masked.

    Raises RuleFailed, as do the advantages.
    """
    function = _loaded(rule)

    def advantages(group: GroupInputs) -> list[np.ndarray]:
        made, lengths = _called(rule, function, group), [len(one.sampled) for one in group.episodes]
        try:
            arrays = [np.asarray(one, np.float64) for one in made]
        except (TypeError, ValueError) as error:
            raise RuleFailed(f"{rule} returned {type(made).__name__}: {error}", _WANTED) from error
        if len(arrays) != len(lengths):
            raise RuleFailed(f"{rule} returned {len(arrays)} advantages for {len(lengths)} episodes", _WANTED)
        for one, n in zip(arrays, lengths, strict=True):
            if one.shape not in ((), (n,)):
                raise RuleFailed(f"{rule} returned {list(one.shape)} for an episode of {n} tokens", _WANTED)
        whole = [np.broadcast_to(one, (n,)) for one, n in zip(arrays, lengths, strict=True)]
        if not all(np.isfinite(a[e.sampled]).all() for a, e in zip(whole, group.episodes, strict=True)):
            rewards = f"rewards {np.array2string(group.rewards, threshold=8, precision=4)}"
            raise RuleFailed(f"{rule} returned advantages that are not finite for {rewards}", _WANTED)
        return [np.where(e.sampled, a, 0.0) for a, e in zip(whole, group.episodes, strict=True)]

    return advantages


_WANTED = "return a finite number for each episode, [G], or an array [N] for each episode's tokens"


@cache
def _loaded(rule: OwnRule) -> Callable[[Any], Any]:
    """Run the rule's file, once in this process, and return its function. Raises RuleFailed."""
    name = f"volley_rule_{rule.sha256[:16]}"
    module, place = ModuleType(name), f"<{rule.file} {rule.sha256[:12]}>"
    linecache.cache[place] = (len(rule.text), None, rule.text.splitlines(keepends=True), place)  # for tracebacks
    sys.modules[name] = module  # dataclasses look there
    try:
        exec(compile(rule.text, place, "exec"), module.__dict__)  # noqa: S102 the user's own file, which they named
        function = getattr(module, rule.function)
    except Exception as error:
        raise _failed(rule, error) from error
    if not callable(function):
        raise RuleFailed(f"{rule}: {rule.function} is not a function")
    return function


def read(value: str) -> OwnRule:
    """Read a rule from a loaded configuration. Raises RuleFailed if it holds the file's name alone."""
    try:
        return own_rules.parse(value)
    except ValueError as error:
        raise RuleFailed(str(error), "load the configuration with shared.config.load") from error


def _called(rule: OwnRule, function: Callable[[Any], Any], given: Any) -> Any:
    try:
        return function(given)
    except Exception as error:
        raise _failed(rule, error) from error


def _failed(rule: OwnRule, error: Exception) -> RuleFailed:
    """Make the error of a rule that raised: with the line of its file, and the first line of the message."""
    lines = [
        one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(f"<{rule.file}")
    ]
    where = f" at line {lines[-1]}" if lines else ""
    message = next(iter(str(error).splitlines()), "")[:300]
    return RuleFailed(f"{rule} raised {type(error).__name__}{where}: {message}")
