"""Capabilities that a rollout server's engine declares, and the settings of a run that need them.

Servers, trainer and commands exchange these declarations. What each kind can do at most, `shared.engine_kinds` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shared import engine_kinds
from shared.engine_kinds import CAPABILITIES, Capability
from shared.errors import ConfigError, InputError
from shared.schema import RunConfig

IN_FLIGHT: tuple[Capability, ...] = ("in_flight_update", "spans")
"""Capabilities that every update mode but `abort` needs."""
_PROOFS: tuple[Capability, ...] = ("audit", "probe")
_MOST_NAME = 64
AS_REPORTED = "weights as reported by the server"
"""Level between proven and violated: nothing contradicts the server, and nothing but its word says what it served."""


@dataclass(frozen=True, slots=True)
class DeclaredEngine:
    """Kind of an engine, as `rollout.engine.kind` names it, and its capabilities."""

    kind: str
    capabilities: tuple[str, ...] = CAPABILITIES

    @property
    def lacks(self) -> tuple[Capability, ...]:
        """Known capabilities that the engine does not declare."""
        return tuple(one for one in CAPABILITIES if one not in self.capabilities)

    @property
    def unproven(self) -> str | None:
        """Sentence if the engine's weights cannot be checked against the trainer's; else None."""
        missing = [one for one in _PROOFS if one in self.lacks]
        return f"{AS_REPORTED}: engine {self.kind} has no {', '.join(missing)}" if missing else None

    def __str__(self) -> str:
        return f"{self.kind} (without {', '.join(self.lacks)})" if self.lacks else self.kind

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "capabilities": list(self.capabilities)}

    @classmethod
    def from_json(cls, value: Any) -> Self | None:
        """Parse a declaration; None for anything but the output of `to_json`."""
        if not isinstance(value, Mapping):
            return None
        kind, capabilities = value.get("kind"), value.get("capabilities")
        if not (isinstance(kind, str) and 0 < len(kind) <= _MOST_NAME and isinstance(capabilities, list)):
            return None
        return cls(kind, tuple(one for one in _most(kind, CAPABILITIES) if one in capabilities))

    @classmethod
    def of_kind(cls, kind: str) -> Self:
        """Return the engine of a kind; one that is not known here has no capabilities."""
        return cls(kind, _most(kind, ()))

    def check_mode(self, mode: str) -> None:
        """Raises InputError if weights cannot be committed in this mode."""
        missing = [one for one in IN_FLIGHT if one in self.lacks]
        if missing and mode != "abort":
            raise InputError(
                f"mode={mode} needs {', '.join(missing)}, which engine {self.kind} does not have", "send mode=abort"
            )

    def check(self, config: RunConfig, has_experts: bool) -> None:
        """Raise ConfigError if the run needs a capability that the engine does not declare."""
        for key, capability, hint in _needs(config, has_experts):
            if capability in self.lacks:
                raise ConfigError(
                    f"{key} needs {capability}, which rollout.engine.kind={self.kind} does not have", hint
                )


def _most(kind: str, unknown: tuple[Capability, ...]) -> tuple[Capability, ...]:
    """Capabilities of a kind; `unknown` for one that is not known here."""
    return engine_kinds.kind_of(kind).capabilities if kind in engine_kinds.names() else unknown


def _needs(config: RunConfig, has_experts: bool) -> Iterator[tuple[str, Capability, str]]:
    """Yield each setting, the capability it needs, and a hint on how to do without it."""
    another = "choose another rollout.engine.kind"
    yield f"mode={config.mode}", "exact_ids", another
    if config.rollout.update_mode != "abort":
        for one in IN_FLIGHT:
            yield (
                f"rollout.update_mode={config.rollout.update_mode}",
                one,
                f"set rollout.update_mode=abort, or {another}",
            )
    if config.model.routing_replay and has_experts:
        yield "model.routing_replay=true", "routing", f"set model.routing_replay=false, or {another}"
