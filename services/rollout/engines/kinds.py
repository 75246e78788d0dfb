"""The table of engines: one row for each `rollout.engine.kind`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from services.rollout.engines.base import Engine, EngineSpec
from services.rollout.engines.sglang_jax import client as sglang_jax
from shared.engines import CAPABILITIES, Capability, DeclaredEngine

type OpenEngine = Callable[[EngineSpec], AbstractAsyncContextManager[Engine]]


class EngineKind(NamedTuple):
    """How an engine is started, and which capabilities it has (see `engines.base.Engine`)."""

    open: OpenEngine
    capabilities: Sequence[Capability]


ENGINES: dict[str, EngineKind] = {
    "sglang_jax": EngineKind(sglang_jax.open_engine, CAPABILITIES),
}


def declared(kind: str) -> DeclaredEngine:
    return DeclaredEngine(kind, tuple(ENGINES[kind].capabilities))
