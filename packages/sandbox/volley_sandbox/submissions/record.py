"""A submitted environment: versions of one name, each with a state, a history and a validation report.

    submitted ──► validating ──► canary ──► active ──► retired
        │             │   └─────────────────►│ ▲          │
        └─────────────┴──► rejected ◄─ canary  └──────────┘

Invariants: a version's source never changes, and its state changes only along these arrows; of one name at most one
version is active and at most one is pending; a number is never reused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.env.backend import AgentSpec
from shared.errors import Conflict
from shared.process import telemetry

type Kind = Literal["python", "remote"]
type State = Literal["submitted", "validating", "canary", "active", "retired", "rejected"]

_VERSIONS = telemetry.Gauge(
    "volley_env_submissions", "Versions of submitted environments by state", ["state"], registry=telemetry.REGISTRY
)
_NEXT: Mapping[State, frozenset[State]] = {
    "submitted": frozenset({"validating", "rejected", "retired"}),
    "validating": frozenset({"canary", "active", "rejected", "retired"}),
    "canary": frozenset({"active", "rejected", "retired"}),
    "active": frozenset({"retired"}),
    "retired": frozenset({"active"}),
    "rejected": frozenset(),
}
STATES: tuple[State, ...] = tuple(_NEXT)
PENDING: frozenset[State] = frozenset({"submitted", "validating", "canary"})
LIVE: frozenset[State] = frozenset({*PENDING, "active"})
PLAYABLE: frozenset[State] = frozenset({"canary", "active", "retired"})
"""States in which a full name can be played. Retired versions can, so that earlier tickets keep their tasks."""
MAX_HISTORY = 64
_ROLLED_BACK = "rolled back"


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(Frozen):
    """One check of the validation; `hint` says what the author can do."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


class Report(Frozen):
    """Findings of the validation.

    `warnings` do not reject. Times are the longest of any call, in seconds of wall time.
    """

    checks: tuple[Check, ...] = ()
    warnings: tuple[str, ...] = ()
    n_episodes: int = 0
    reward_min: float | None = None
    reward_max: float | None = None
    reset_s: float | None = None
    step_s: float | None = None
    log: str = ""

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)

    @property
    def passed(self) -> bool:
        return not self.failed


class Transition(Frozen):
    """`at` is in seconds since 1970."""

    state: State
    at: float
    why: str = ""


class SubmittedVersion(Frozen):
    """One version of a submitted environment.

    `splits` are known after validation; `digest` is the SHA-256 of the submitted content, `size` its bytes; `url` is
    the address of a remote environment, None if it came as a file; `agent` says how an agent plays its episodes.
    """

    name: str
    version: int
    url: str | None = None
    archive: bool = False
    entry: str | None = None
    config: dict[str, Any] = {}
    weight: float = 0.0
    digest: str
    size: int
    splits: dict[str, int] = {}
    tools: tuple[dict[str, Any], ...] = ()
    has_demonstration: bool = False
    protocol: str = ""
    agent: AgentSpec | None = None
    history: tuple[Transition, ...]
    report: Report | None = None

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def kind(self) -> Kind:
        return "python" if self.url is None else "remote"

    @property
    def state(self) -> State:
        return self.history[-1].state

    @property
    def why(self) -> str:
        return self.history[-1].why

    def to(self, state: State, why: str = "", **changes: Any) -> SubmittedVersion:
        """The version in another state. Raises Conflict if the transition is not allowed."""
        if state not in _NEXT[self.state]:
            after = ", ".join(sorted(_NEXT[self.state])) or "nothing"
            raise Conflict(
                f"{self.full_name} is {self.state}: it cannot become {state}", f"allowed next states: {after}"
            )
        history = (*self.history, Transition(state=state, at=time.time(), why=why))[-MAX_HISTORY:]
        return self.model_copy(update={**changes, "history": history})

    @property
    def replacement_reason(self) -> str:
        """Return the reason stored with the version that this one replaced."""
        return f"{self.full_name} took its place"

    def replaced(self, known: Iterable[SubmittedVersion]) -> SubmittedVersion | None:
        """The earlier version that this one replaced, for a roll-back. A version is rolled back at most once.

        Args:
            known: all versions of its name.
        """
        if any(line.why.startswith(_ROLLED_BACK) for line in self.history):
            return None
        left = ("retired", self.replacement_reason)
        return next((v for v in known if (v.state, v.why) == left and v.version < self.version and v.splits), None)

    def rolled_back(self, before: SubmittedVersion, why: str) -> tuple[SubmittedVersion, SubmittedVersion]:
        """The version before, active again, and this one, retired."""
        return (
            before.to("active", f"{self.full_name} was rolled back: {why}"),
            self.to("retired", f"{_ROLLED_BACK} to {before.full_name}: {why}"),
        )

    def describe(self) -> dict[str, Any]:
        """One row of GET /environments."""
        return {
            "name": self.full_name,
            "base": self.kind,
            "config": self.config,
            "state": self.state,
            "version": self.version,
            "weight": self.weight,
            "why": self.why,
            "url": self.url,
        }


def listed(known: Mapping[int, SubmittedVersion]) -> list[SubmittedVersion]:
    """Live versions of a name, and the newest of the others."""
    newest_at_rest = max((n for n, version in known.items() if version.state not in LIVE), default=0)
    return [known[n] for n in sorted(known) if known[n].state in LIVE or n == newest_at_rest]


def count(versions: Iterable[SubmittedVersion]) -> None:
    """Set the metric of versions by state."""
    counted = Counter(version.state for version in versions)
    for state in STATES:
        _VERSIONS.labels(state).set(counted[state])
