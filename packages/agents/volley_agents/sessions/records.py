"""Stored records of a session: what it is for, its state, its result, its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.orchestrator.episodes.turn import SamplingSpec
from shared import codec
from shared.clients.env import AgentKind, Opening
from shared.outcomes import End
from shared.types import Message, Status
from volley_agents.sessions.messages import Digest

type State = Literal["running", "ended", "trained", "void"]
STATES: tuple[State, ...] = ("running", "ended", "trained", "void")
OPEN: tuple[State, ...] = ("running", "ended")
"""States of sessions whose samples are still wanted."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Facts of a session that never change.

    `place` names the sample that it plays: two sessions with one place are attempts. `request_id` and `episode_id` are
    those of the environment's episode, which the environment judges if `judged`. `opened` is in seconds since 1970.
    `beginning` is the identifier of the run whose tickets these are; empty if it was not known yet.
    """

    id: str
    place: str
    ticket: int
    sample_index: int
    env: str
    split: str
    task: str
    agent: AgentKind
    request_id: str
    episode_id: str
    judged: bool
    opened: float
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    beginning: str = ""

    def encode(self) -> bytes:
        return codec.pack({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @classmethod
    def decode(cls, data: bytes) -> SessionRecord:
        """Raises DecodeError."""
        return cls(**codec.unpack(data, "a session"))


@dataclass(frozen=True, slots=True)
class SessionResult:
    """Judgement of a session; as in `Trajectory`."""

    reward: float
    success: bool
    components: Mapping[str, float] = field(default_factory=dict)
    status: Status = "completed"
    end: End = "answered"

    def encode(self) -> bytes:
        return codec.pack({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @classmethod
    def decode(cls, data: bytes) -> SessionResult:
        """Raises DecodeError."""
        return cls(**codec.unpack(data, "a session's result"))


@dataclass(slots=True)
class CallEntry:
    """A recorded call: its idempotency key, the digest of its body, and whether its answer was sent."""

    number: int
    key: str | None
    body: Digest
    delivered: bool = False


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Identity of a call as it arrived. `is_retry`: the client says that it has sent it before."""

    body: Digest
    key: str | None = None
    is_retry: bool = False


def place_of(spec: SamplingSpec) -> str:
    """Return the key of a sample; for an evaluation it includes the task and the measured step."""
    if spec.ticket:
        return f"{spec.ticket}/{spec.sample_index}"
    return f"{spec.env}/{spec.split}/{spec.index}@{spec.need.min_step}"


def new_record(
    id_: str, spec: SamplingSpec, opening: Opening, request_id: str, opened: float, run_id: str
) -> SessionRecord:
    """Make the record of a new session."""
    assert opening.agent is not None
    return SessionRecord(
        id=id_,
        place=place_of(spec),
        ticket=spec.ticket,
        sample_index=spec.sample_index,
        env=spec.env,
        split=spec.split,
        task=opening.task,
        agent=opening.agent,
        request_id=request_id,
        episode_id=opening.episode_id,
        judged=opening.judged,
        opened=opened,
        messages=list(opening.messages),
        tools=list(opening.tools),
        beginning=run_id,
    )
