"""Import the function that opens an engine of a `rollout.engine.kind`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pkgutil import resolve_name

from services.rollout.engines.base import Engine, EngineSpec
from shared.engine_kinds import kind_of

type OpenEngine = Callable[[EngineSpec], AbstractAsyncContextManager[Engine]]
"""Raises ConfigError, or EngineDied with the engine's reason."""


def opener(kind: str) -> OpenEngine:
    """Import the function that opens engines of a kind."""
    return resolve_name(kind_of(kind).opener)
