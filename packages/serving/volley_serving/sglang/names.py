"""Check the names of a request's fields against those of SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from services.rollout.api.validation import short
from shared.bounds import is_one_of
from shared.errors import InputError

_MAX_NAME = 80


def check_names(raw: Mapping[str, Any], known: Set[str], neutral: Mapping[str, tuple[Any, ...]], what: str) -> None:
    """Refuse names that are not `known`, unless the value is a neutral one. Raises InputError."""
    for name in raw.keys() - known:
        if name not in neutral:
            raise InputError(f"unknown {what or 'field '}{str(name)[:_MAX_NAME]}", f"known: {', '.join(sorted(known))}")
        if not is_one_of(raw[name], neutral[name]):
            raise InputError(f"{what}{name}={short(raw[name])} is not supported", "remove it from the request")
