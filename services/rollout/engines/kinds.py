"""The table of engines: one row for each `rollout.engine.kind`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple

from services.rollout.engines.base import Engine, EngineSpec
from services.rollout.engines.http_server.opening import open_engine
from services.rollout.engines.http_server.sglang import SglangServer
from services.rollout.engines.http_server.vllm import VllmServer
from services.rollout.engines.sglang_jax import client as sglang_jax
from shared.engines import CAPABILITIES, Capability, DeclaredEngine

type OpenEngine = Callable[[EngineSpec], AbstractAsyncContextManager[Engine]]


class EngineKind(NamedTuple):
    """How an engine is started, and which capabilities it has (see `engines.base.Engine`)."""

    open: OpenEngine
    capabilities: Sequence[Capability]


_OF_SERVERS: tuple[Capability, ...] = ("exact_ids", "spans", "in_flight_update", "probe")
ENGINES: dict[str, EngineKind] = {
    "sglang_jax": EngineKind(sglang_jax.open_engine, CAPABILITIES),
    "sglang": EngineKind(partial(open_engine, make=SglangServer), _OF_SERVERS),
    "vllm": EngineKind(partial(open_engine, make=VllmServer), _OF_SERVERS),
}


def declared(kind: str) -> DeclaredEngine:
    return DeclaredEngine(kind, tuple(ENGINES[kind].capabilities))
