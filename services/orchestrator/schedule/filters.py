"""Filters of complete groups, by name and by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from shared.errors import ConfigError, VolleyError
from shared.generation_schema import GenerationFilters
from shared.group_rules import GroupRule, min_reward, of_trained, reasonable_length, response_diversity, zero_variance
from shared.outcomes import FilterRule
from shared.types import Group

_KEY = "orchestrator.generation.filters.custom"
_DIVERSE = 0.5
"""Share of different responses that slime's `quality_and_diversity` asks for."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A rule, and the name under which the ledger counts its groups."""

    rule: FilterRule
    why: GroupRule


def group_filters(config: GenerationFilters, mask_truncated: bool = False) -> tuple[GroupFilter, ...]:
    """Return the configured filters. Raises ConfigError if a function cannot be imported.

    Rules look at the episodes in the loss (`mask_truncated` leaves truncated ones out); a function of the user gets the
    whole group.
    """
    rules = (replace(f, why=partial(of_trained, f.why, mask_truncated=mask_truncated)) for f in _rules(config))
    custom = (GroupFilter("custom", partial(_asked, imported(path), path)) for path in config.custom)
    return (*rules, *custom)


def _rules(config: GenerationFilters) -> Iterator[GroupFilter]:
    if config.reward_nonzero_std or config.quality_and_diversity:
        yield GroupFilter("zero_variance", zero_variance)
    if config.min_reward is not None:
        yield GroupFilter("min_reward", partial(min_reward, threshold=config.min_reward))
    shares = [config.response_diversity or 0.0, _DIVERSE if config.quality_and_diversity else 0.0]
    if share := max(shares):
        yield GroupFilter("response_diversity", partial(response_diversity, min_unique_ratio=share))
    if config.reasonable_length is not None:
        low, high = config.reasonable_length
        yield GroupFilter("reasonable_length", partial(reasonable_length, min_tokens=low, max_tokens=high))


def imported(path: str) -> Callable[[Group], object]:
    """Import MODULE:FUNCTION. Raises ConfigError."""
    module, _, name = path.partition(":")
    hint = "give MODULE:FUNCTION of a module that the orchestrator can import (PYTHONPATH)"
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code runs
        raise ConfigError(f"{_KEY}: {path} cannot be imported: {error!r}", hint) from error
    if not callable(function):
        raise ConfigError(f"{_KEY}: {path} is not a function", hint)
    return function


def _asked(keeps: Callable[[Group], object], path: str, group: Group) -> str | None:
    try:
        kept = keeps(group)
    except Exception as error:
        raise VolleyError(f"{_KEY}: {path} failed on the group of ticket {group.ticket}: {error!r}") from error
    return None if kept else f"{path} rejected it"
