"""The vocabulary of the wire: weight versions, trajectories, groups.

Invariants of a trajectory, checked by `Trajectory.validate`:
- token-in-token-out: `token_ids` are the engine's own ids and the environment's appended ones, never re-tokenized text;
- `loss_mask` is 1 exactly on sampled tokens, `logprobs` is finite there and 0 elsewhere;
- `versions` covers exactly the sampled positions, in order and without overlap;
- the three arrays have one length T, and the prompt is never sampled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from shared import codec
from shared.errors import DecodeError

SCHEMA = 1
Status = Literal["completed", "truncated"]
Message = Mapping[str, Any]
_VERSION = re.compile(r"e(\d{6,})-s(\d{6,})\Z")


@dataclass(frozen=True, order=True, slots=True)
class WeightVersion:
    """Identity of a set of weights: the trainer's `epoch` (incarnation), then its optimizer `step`. A higher epoch wins."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"e{self.epoch:06d}-s{self.step:06d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises DecodeError if `text` is not of the form e000001-s000042."""
        match = _VERSION.match(text)
        if match is None:
            raise DecodeError(f"{text!r} is not a weight version", "expected the form e000001-s000042")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Positions [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Positions [start, end) belong to one message; `reward` is what the environment gave for it."""

    start: int
    end: int
    role: str
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, token by token.

    Shapes: `token_ids` int32 [T], `loss_mask` uint8 [T], `logprobs` float32 [T] (behaviour, natural log).
    `timings` are seconds.
    """

    ticket: int
    sibling: int
    attempt: int
    env: str
    task: str
    prompt_len: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    reward: float
    success: bool
    status: Status
    reward_components: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_sampled(self) -> int:
        return int(self.loss_mask.sum())

    def oldest(self) -> WeightVersion:
        """The oldest version that sampled a token of this trajectory."""
        return min(WeightVersion.parse(span.version) for span in self.versions)

    def validate(self) -> None:
        """Raises DecodeError naming the broken invariant."""
        n = len(self.token_ids)
        _require(n == len(self.loss_mask) == len(self.logprobs), "token_ids, loss_mask and logprobs differ in length")
        _require(0 < self.prompt_len <= n, "prompt_len is outside the sequence")
        _require(self.token_ids.dtype == np.int32 and bool((self.token_ids >= 0).all()), "token_ids are not ids")
        _require(bool((self.loss_mask <= 1).all()), "loss_mask holds something else than 0 and 1")
        _require(not self.loss_mask[: self.prompt_len].any(), "the prompt is marked as sampled")
        sampled = self.loss_mask.astype(bool)
        _require(bool(np.isfinite(self.logprobs).all()), "a log-probability is not finite")
        _require(not self.logprobs[~sampled].any(), "a log-probability stands at a position that was not sampled")
        _require(bool((self.logprobs <= 1e-3).all()), "a log-probability is positive")
        covered = np.zeros(n, bool)
        for span in self.versions:
            _require(0 <= span.start < span.end <= n, "a version span is empty or outside the sequence")
            _require(not covered[span.start : span.end].any(), "version spans overlap")
            covered[span.start : span.end] = True
        _require(bool((covered == sampled).all()), "version spans do not cover exactly the sampled tokens")
        _require(bool(sampled.any()), "no token was sampled")
        _require(all(0 <= turn.start <= turn.end <= n for turn in self.turns), "a turn lies outside the sequence")
        _require(bool(np.isfinite(self.reward)), "the reward is not finite")


@dataclass(frozen=True, slots=True)
class Group:
    """All G episodes of one ticket: what travels through the queue. A failed group carries its error class and no trajectories."""

    ticket: int
    env: str
    task: str
    trajectories: tuple[Trajectory, ...]
    failure: str | None = None

    def oldest(self) -> WeightVersion:
        return min(trajectory.oldest() for trajectory in self.trajectories)

    def validate(self) -> None:
        """Raises DecodeError naming the broken invariant."""
        _require(bool(self.trajectories) != (self.failure is not None), "a group has either trajectories or a failure")
        for trajectory in self.trajectories:
            _require(trajectory.ticket == self.ticket, "a trajectory carries another ticket than its group")
            trajectory.validate()

    def encode(self) -> bytes:
        """The flat, versioned wire record (see shared.codec)."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["schema"] = SCHEMA
        record["trajectories"] = [_trajectory_record(t) for t in self.trajectories]
        return codec.pack(record)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises DecodeError if the bytes are not a valid group of this schema."""
        record = codec.unpack(data, "group")
        _require(isinstance(record, dict) and record.get("schema") == SCHEMA, f"not a group of schema {SCHEMA}")
        try:
            group = cls(
                ticket=int(record["ticket"]),
                env=str(record["env"]),
                task=str(record["task"]),
                trajectories=tuple(_trajectory(r) for r in record["trajectories"]),
                failure=record["failure"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"group lacks or mistypes a field: {error!r}") from error
        group.validate()
        return group


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    record = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    record["versions"] = [[s.version, s.start, s.end] for s in trajectory.versions]
    record["turns"] = [[t.start, t.end, t.role, t.reward] for t in trajectory.turns]
    record["reward_components"], record["timings"] = dict(trajectory.reward_components), dict(trajectory.timings)
    return record


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        ticket=int(record["ticket"]),
        sibling=int(record["sibling"]),
        attempt=int(record["attempt"]),
        env=str(record["env"]),
        task=str(record["task"]),
        prompt_len=int(record["prompt_len"]),
        token_ids=_array(record["token_ids"], "i4"),
        loss_mask=_array(record["loss_mask"], "u1"),
        logprobs=_array(record["logprobs"], "f4"),
        versions=tuple(VersionSpan(str(v), int(a), int(b)) for v, a, b in record["versions"]),
        turns=tuple(Turn(int(a), int(b), str(role), float(reward)) for a, b, role, reward in record["turns"]),
        reward=float(record["reward"]),
        success=bool(record["success"]),
        status=_status(record["status"]),
        reward_components={str(k): float(v) for k, v in record["reward_components"].items()},
        timings={str(k): float(v) for k, v in record["timings"].items()},
    )


def _array(value: Any, dtype: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(dtype):
        raise TypeError(f"expected a {dtype} array, got {type(value).__name__}")
    return value


def _status(value: Any) -> Status:
    if value == "completed" or value == "truncated":
        return value
    raise ValueError(f"unknown status {value!r}")


def spans(versions: Sequence[str], positions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Run-length spans of per-token versions at ascending positions; a gap in the positions ends a span."""
    out: list[VersionSpan] = []
    for version, position in zip(versions, positions, strict=True):
        if out and out[-1].version == version and out[-1].end == position:
            out[-1] = VersionSpan(version, out[-1].start, position + 1)
        else:
            out.append(VersionSpan(version, position, position + 1))
    return tuple(out)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DecodeError(message)
