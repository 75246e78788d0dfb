"""Types that services exchange: weight versions, trajectories, groups.

`Trajectory.validate` checks the invariants of a trajectory:
- token-in-token-out: `token_ids` are the ids that the engine sampled and the environment appended, never re-tokenized
  text;
- `loss_mask` is 1 exactly on sampled tokens; `logprobs` is finite there and 0 elsewhere;
- `teacher_logprobs`, if present, is finite on sampled tokens and 0 elsewhere;
- `versions` covers exactly the sampled positions, in order and without overlap;
- the three arrays have one length T, and no token of the prompt is sampled;
- `routed_experts`, if present, covers the first n positions, n <= T.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from shared import codec, routing
from shared.errors import DecodeError, Untrainable
from shared.outcomes import ENDS, FILTERS, End, FilterRule

SCHEMA = 1
Status = Literal["completed", "truncated"]
Message = Mapping[str, Any]
ASSISTANT = "assistant"
"""Role of the turns that the model samples."""
MAX_MESSAGE = 2**20
"""Largest message, in characters, that the environment service accepts."""
MAX_GROUP_OBJECTS = 2**21
"""Largest number of values in a group; 64 episodes of a thousand assistant messages each stay below it."""
_MAX_DETAIL = 300
_VERSION = re.compile(r"e([0-9]{6,18})-s([0-9]{6,18})\Z")


@dataclass(frozen=True, order=True, slots=True)
class WeightVersion:
    """Identity of a set of weights: trainer `epoch` (incarnation), then optimizer `step`.

    Versions are ordered by epoch first.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"e{self.epoch:06d}-s{self.step:06d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse e000001-s000042. Raises DecodeError for any other form."""
        match = _VERSION.match(text)
        if match is None:
            raise DecodeError(f"{text[:50]!r} is not a weight version", "expected the form e000001-s000042")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_name(cls, name: str) -> Self | None:
        """Parse the name of a version; return None for weights with any other name."""
        return cls.parse(name) if _VERSION.match(name) else None


type Lineage = tuple[tuple[int, int], ...]
"""(epoch, first step) of each incarnation of the trainer, oldest first; see `shared.run.state.in_lineage`."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled positions [start, end) and the weights that sampled them."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Positions [start, end) of one message, and the environment's reward for it."""

    start: int
    end: int
    role: str
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, token by token.

    Shapes: `token_ids` int32 [T]; `loss_mask` uint8 [T]; `logprobs` float32 [T], behaviour log-probabilities (natural
    log); `teacher_logprobs` float32 [T], the teacher's (None without a teacher; then absent on the wire);
    `routed_experts` [n, L, k], the experts that the engine chose for the first n positions (see shared.routing; None if
    not recorded; then absent on the wire). `timings` are in seconds.

    `status` is `completed` if the environment ended the episode after a whole turn, and `truncated` if a limit cut the
    last turn or ended the episode. Older records say `completed` after a cut last turn; they are trained on and
    replayed as recorded. `end` says how the episode ended (None in records older than the field). `faults` counts turns
    by the model's mistake, `failures` counts failed attempts of the episode by error class (see shared.outcomes).
    """

    ticket: int
    sample_index: int
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
    end: End | None = None
    faults: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    teacher_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @property
    def n_sampled(self) -> int:
        return int(self.loss_mask.sum())

    def oldest(self) -> WeightVersion:
        """Return the oldest version that sampled a token of this trajectory."""
        return min(WeightVersion.parse(span.version) for span in self.versions)

    def validate(self) -> None:
        """Check the invariants.

        Raises DecodeError naming the broken invariant, and Untrainable for a readable trajectory that cannot be trained
        on.
        """
        n = len(self.token_ids)
        _require(n == len(self.loss_mask) == len(self.logprobs), "token_ids, loss_mask and logprobs differ in length")
        _require(0 < self.prompt_len <= n, "prompt_len is outside the sequence")
        _require(self.token_ids.dtype == np.int32 and bool((self.token_ids >= 0).all()), "token_ids are not ids")
        _require(bool((self.loss_mask <= 1).all()), "loss_mask holds something else than 0 and 1")
        _require(not self.loss_mask[: self.prompt_len].any(), "the prompt is marked as sampled")
        sampled = self.loss_mask.astype(bool)
        for logprobs in (self.logprobs, self.teacher_logprobs):
            self._validate_logprobs(logprobs, sampled)
        routed = self.routed_experts
        _require(routed is None or len(routed) <= n, "there are experts of more positions than there are")
        covered = np.zeros(n, bool)
        for span in self.versions:
            WeightVersion.parse(span.version)
            _require(0 <= span.start < span.end <= n, "a version span is empty or outside the sequence")
            _require(not covered[span.start : span.end].any(), "version spans overlap")
            covered[span.start : span.end] = True
        _require(bool((covered == sampled).all()), "version spans do not cover exactly the sampled tokens")
        _require_trainable(bool(sampled.any()), "no_tokens", self)
        _require(all(0 <= turn.start <= turn.end <= n for turn in self.turns), "a turn lies outside the sequence")
        rewards = [self.reward, *self.reward_components.values(), *(turn.reward for turn in self.turns)]
        _require_trainable(all(map(math.isfinite, rewards)), "nonfinite_reward", self)

    def _validate_logprobs(self, logprobs: np.ndarray | None, sampled: np.ndarray) -> None:
        if logprobs is None:
            return
        _require(len(logprobs) == len(sampled), "token_ids and a teacher's log-probabilities differ in length")
        _require_trainable(bool(np.isfinite(logprobs).all()), "nonfinite_logprob", self)
        _require(not logprobs[~sampled].any(), "a log-probability stands at a position that was not sampled")
        _require(bool((logprobs <= 1e-3).all()), "a log-probability is positive")


@dataclass(frozen=True, slots=True)
class Group:
    """All G episodes of one ticket, as they travel through the queue.

    A failed group has an error class and no trajectories.
    """

    ticket: int
    env: str
    task: str
    trajectories: tuple[Trajectory, ...]
    failure: str | None = None

    def oldest(self) -> WeightVersion:
        return min(trajectory.oldest() for trajectory in self.trajectories)

    def validate(self) -> None:
        """Check the group and its trajectories. Raises DecodeError naming the broken invariant."""
        _require(bool(self.trajectories) != (self.failure is not None), "a group has either trajectories or a failure")
        for trajectory in self.trajectories:
            _require(trajectory.ticket == self.ticket, "a trajectory carries another ticket than its group")
            trajectory.validate()

    def encode(self) -> bytes:
        """Encode the flat, versioned wire record (see shared.codec)."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["schema"] = SCHEMA
        record["trajectories"] = [_trajectory_record(t) for t in self.trajectories]
        return codec.pack(record)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode and validate a group. Raises DecodeError for bytes that are not a valid group of this schema."""
        record = codec.unpack(data, "group", MAX_GROUP_OBJECTS)
        _require(
            isinstance(record, dict) and repr(record.get("schema")) == str(SCHEMA), f"not a group of schema {SCHEMA}"
        )
        try:
            group = cls(
                ticket=_int(record["ticket"]),
                env=_text(record["env"]),
                task=_text(record["task"]),
                trajectories=tuple(_trajectory(r) for r in record["trajectories"]),
                failure=None if record["failure"] is None else _text(record["failure"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"group lacks or mistypes a field: {error!r}"[:_MAX_DETAIL]) from error
        group.validate()
        return group


_ON_WIRE = {"sample_index": "sibling"}
"""Fields with another name on the wire and in archives."""


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    record = {_ON_WIRE.get(f.name, f.name): getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    record["versions"] = [[s.version, s.start, s.end] for s in trajectory.versions]
    record["turns"] = [[t.start, t.end, t.role, t.reward] for t in trajectory.turns]
    for name in ("reward_components", "timings", "faults", "failures"):
        record[name] = dict(record[name])
    if trajectory.teacher_logprobs is None:
        del record["teacher_logprobs"]
    del record["routed_experts"]
    if trajectory.routed_experts is not None:
        record["routed_experts"] = routing.to_wire(trajectory.routed_experts)
    return record


def _trajectory(record: Any) -> Trajectory:
    if not isinstance(record, dict):
        raise TypeError(f"expected a trajectory, got {type(record).__name__}")
    return Trajectory(
        ticket=_int(record["ticket"]),
        sample_index=_int(record["sibling"]),
        attempt=_int(record["attempt"]),
        env=_text(record["env"]),
        task=_text(record["task"]),
        prompt_len=_int(record["prompt_len"]),
        token_ids=_array(record["token_ids"], "i4"),
        loss_mask=_array(record["loss_mask"], "u1"),
        logprobs=_array(record["logprobs"], "f4"),
        versions=tuple(VersionSpan(_text(v), _int(a), _int(b)) for v, a, b in record["versions"]),
        turns=tuple(Turn(_int(a), _int(b), _text(role), _float(reward)) for a, b, role, reward in record["turns"]),
        reward=_float(record["reward"]),
        success=bool(record["success"]),
        status=_status(record["status"]),
        reward_components={_text(k): _float(v) for k, v in record["reward_components"].items()},
        timings={_text(k): _float(v) for k, v in record["timings"].items()},
        end=_end(record.get("end")),
        faults=_counts(record.get("faults", {})),
        failures=_counts(record.get("failures", {})),
        teacher_logprobs=_array(record["teacher_logprobs"], "f4") if "teacher_logprobs" in record else None,
        routed_experts=routing.from_wire(record["routed_experts"]) if "routed_experts" in record else None,
    )


def _array(value: Any, dtype: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(dtype):
        raise TypeError(f"expected a {dtype} array, got {type(value).__name__}")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {type(value).__name__}")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _counts(value: Any) -> dict[str, int]:
    return {_text(name): _int(n) for name, n in value.items()}


def _end(value: Any) -> End | None:
    if value is not None and _text(value) not in ENDS:
        raise ValueError(f"unknown end {value!r}")
    return value


def _status(value: Any) -> Status:
    if value == "completed" or value == "truncated":
        return value
    raise ValueError(f"unknown status {value!r}")


def spans(versions: Sequence[str], positions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Merge per-token versions at ascending positions into spans; a gap between positions ends a span."""
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


def _require_trainable(condition: bool, rule: FilterRule, trajectory: Trajectory) -> None:
    if not condition:
        raise Untrainable(f"episode {trajectory.sample_index}: {FILTERS[rule]}", rule=rule)
