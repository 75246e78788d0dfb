"""Kinds of engines that `rollout.engine.kind` can name: the core's own, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shared import packages

type Capability = Literal["exact_ids", "spans", "in_flight_update", "audit", "routing", "probe"]
"""
exact_ids: output ids are the sampled tokens, each with its log-probability.
spans: an answer names the weight version of every token, also where versions change within it.
in_flight_update: weights may change while requests run, which then go on.
audit: the checksum of the arrays that the next step uses can be read at any time.
routing: the engine can return the experts that tokens were sent to.
probe: the engine compares its log-probabilities of given tokens with the trainer's before weights serve.
"""
CAPABILITIES: tuple[Capability, ...] = get_args(Capability.__value__)


def _no_findings(_: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Description of a kind of engine, without its code.

    Args:
        opener: `MODULE:FUNCTION` that opens an engine (`services.rollout.engines.kinds.OpenEngine`). Only a rollout
            server imports it.
        capabilities: what such an engine can do at most, so that no server and no record of a run claims more.
        is_external: the engine is a server of another project, which runs already, at `rollout.engine.url`.
        findings: from a RunConfig, sentences on settings that have no effect on this kind (`shared.findings`).
    """

    opener: str
    capabilities: tuple[Capability, ...] = CAPABILITIES
    is_external: bool = False
    findings: Callable[[Any], Iterable[str]] = _no_findings


OWN = {"sglang_jax": EngineKind("services.rollout.engines.sglang_jax.client:open_engine")}
"""The core's kinds."""


def names() -> list[str]:
    """Return the names of all kinds."""
    return [*OWN, *packages.found(packages.ENGINES)]


def kind_of(name: str) -> EngineKind:
    """Return the kind of a name. Raises ConfigError if its package cannot be loaded, KeyError for another name."""
    return OWN[name] if name in OWN else packages.load(packages.found(packages.ENGINES)[name])
