"""Types that services exchange: weight versions, trajectories, groups.

`Trajectory.validate` checks the invariants of a trajectory:
- token-in-token-out: `token_ids` are the ids that the engine sampled and the environment appended, never re-tokenized
  text;
- `loss_mask` is 1 exactly on sampled tokens; `logprobs` is finite there and 0 elsewhere;
- `teacher_logprobs`, if present, is finite on sampled tokens and 0 elsewhere; there is none if the `teacher_view` says
  that the teacher lacked something;
- `versions` covers exactly the sampled positions, in order and without overlap;
- the three arrays have one length T, and no token of the prompt is sampled;
- `routed_experts`, if present, covers the first n positions, n <= T;
- each branch begins with tokens of an earlier sequence and keeps the rules above for its own tokens, of which at least
  one is sampled. So each sampled token of an episode is stored, and in the loss, once;
- `seats`, if present, names the seat of each sequence; a branch belongs to the seat of its parent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from shared import codec
from shared.errors import DecodeError
from shared.fields import read_counts, read_float, read_int, read_text
from shared.judgements import Judgement
from shared.outcomes import ENDS, FILTERS, End, FilterRule
from shared.sequences import (
    Branch,
    EpisodeSequence,
    StoredTokens,
    Turn,
    VersionSpan,
    WeightVersion,
    branch_record,
    read_branch,
    read_tokens,
    require,
    require_trainable,
    validate_tokens,
    validate_turns,
    whole,
    write_tokens,
)
from shared.teacher_view import TeacherView, read_view

SCHEMA = 1
Status = Literal["completed", "truncated"]
StoredArray = Literal["token_ids", "loss_mask", "logprobs", "teacher_logprobs"]
Message = Mapping[str, Any]
ASSISTANT = "assistant"
"""Role of the turns that the model samples."""
HISTORY = "history"
"""Role of earlier turns at the beginning of a branch, after the oldest were dropped (left truncation)."""
MAX_MESSAGE = 2**20
"""Largest message, in characters, that the environment service accepts."""
MAX_GROUP_OBJECTS = 2**21
"""Largest number of values in a group; 64 episodes of a thousand assistant messages each stay below it."""
MAX_SEAT = 64
"""Most characters of the name of a seat."""
MAX_BRANCHES = 1023
"""Most branches of an episode."""
MAX_TREE_TOKENS = 2**22
"""Most tokens of all sequences of an episode that has branches, with what they share counted in each."""
_MAX_DETAIL = 300

type Lineage = tuple[tuple[int, int], ...]
"""(epoch, first step) of each incarnation of the trainer, oldest first; see `shared.run.lineage.in_lineage`."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, token by token.

    Shapes: `token_ids` int32 [T]; `loss_mask` uint8 [T]; `logprobs` float32 [T], behaviour log-probabilities (natural
    log); `teacher_logprobs` float32 [T], the teacher's (None without a teacher; then absent on the wire);
    `teacher_view` is what a privileged teacher was shown (None with any other; then absent on the wire);
    `routed_experts` [n, L, k], the experts that the engine chose for the first n positions (see shared.routing; None if
    not recorded; then absent on the wire). `timings` are in seconds.

    `status` is `completed` if the environment ended the episode after a whole turn, and `truncated` if a limit cut the
    last turn or ended the episode. `end` says how the episode ended (None if it is not known). `faults` counts turns by
    the model's mistake, `failures` counts failed attempts of the episode by error class (see shared.outcomes).

    An episode of several sequences has `branches` (absent on the wire without); reward, success, status and end are
    those of the whole episode. In an episode with seats (a game that the policy plays against itself), `seats` names
    the seat of each sequence, sequence 0 first (absent on the wire without); see shared.seats.
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
    branches: tuple[Branch, ...] = ()
    teacher_view: TeacherView | None = None
    seats: tuple[str, ...] = ()

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens in all sequences."""
        return int(self.stored("loss_mask").sum())

    @property
    def n_stored(self) -> int:
        """Number of tokens in all sequences, each token once."""
        return sum(self.own_lengths())

    def stored(self, name: StoredArray) -> np.ndarray:
        """Return an array of all stored tokens: the own tokens of each sequence, sequence 0 first.

        `teacher_logprobs` needs a teacher.
        """
        made: np.ndarray = getattr(self, name)
        return np.concatenate([made, *(getattr(b, name) for b in self.branches)]) if self.branches else made

    def own_lengths(self) -> list[int]:
        """Number of tokens that each sequence stores."""
        return [len(self.token_ids), *(len(branch.token_ids) for branch in self.branches)]

    def all_spans(self) -> Iterator[VersionSpan]:
        """Version spans of all sequences."""
        for one in (self, *self.branches):
            yield from one.versions

    def oldest(self) -> WeightVersion:
        """Return the oldest version that sampled a token of this trajectory."""
        return min(WeightVersion.parse(span.version) for span in self.all_spans())

    def lengths(self) -> list[int]:
        """Length of each whole sequence, in tokens."""
        return [len(self.token_ids), *(branch.shared + len(branch.token_ids) for branch in self.branches)]

    def sequences(self) -> tuple[EpisodeSequence, ...]:
        """Return all sequences whole, sequence 0 first. The trajectory must be valid."""
        names = [f.name for f in dataclasses.fields(EpisodeSequence) if f.name not in ("parent", "shared")]
        made = [EpisodeSequence(-1, 0, **{name: getattr(self, name) for name in names})]
        for branch in self.branches:
            made.append(whole(made[branch.parent] if branch.parent >= 0 else None, branch))
        return tuple(made)

    def validate(self) -> None:
        """Check the invariants.

        Raises DecodeError naming the broken invariant, and Untrainable for a readable trajectory that cannot be trained
        on.
        """
        require(0 < self.prompt_len <= len(self.token_ids), "prompt_len is outside the sequence")
        require(not self.loss_mask[: self.prompt_len].any(), "the prompt is marked as sampled")
        validate_tokens(self, 0, self.sample_index)
        require_trainable(bool(self.loss_mask.any()), "no_tokens", self.sample_index)
        validate_turns(self.turns, 0, len(self.token_ids))
        self._validate_branches()
        if self.teacher_view is not None:
            self.teacher_view.validate(self.lengths(), is_scored=self.teacher_logprobs is not None)
        self._validate_seats()
        turns = [turn for one in (self, *self.branches) for turn in one.turns]
        rewards = [self.reward, *self.reward_components.values(), *(turn.reward for turn in turns)]
        require_trainable(all(map(math.isfinite, rewards)), "nonfinite_reward", self.sample_index)

    def _validate_branches(self) -> None:
        require(len(self.branches) <= MAX_BRANCHES, f"an episode has more than {MAX_BRANCHES} branches")
        lengths = self.lengths()
        require(
            not self.branches or sum(lengths) <= MAX_TREE_TOKENS, f"an episode has more than {MAX_TREE_TOKENS} tokens"
        )
        known = [_n_routed(self)]
        for number, branch in enumerate(self.branches, 1):
            require(-1 <= branch.parent < number, "a branch comes before its parent")
            n_before, known_before = (lengths[branch.parent], known[branch.parent]) if branch.parent >= 0 else (0, 0)
            require(0 <= branch.shared <= n_before, "a branch shares more tokens than its parent has")
            require(branch.parent < 0 or branch.shared > 0, "a branch has a parent, but shares no token of it")
            validate_tokens(branch, branch.shared, self.sample_index)
            validate_turns(branch.turns, branch.shared, lengths[number])
            require(bool(branch.loss_mask.any()), "a branch has no sampled token")
            require(branch.shared > 0 or not branch.loss_mask[0], "the first token of a sequence is marked as sampled")
            known.append(min(branch.shared, known_before) + _n_routed(branch))
            require(known[-1] <= lengths[number], "there are experts of more positions than there are")
        self._validate_alike()

    def _validate_seats(self) -> None:
        if not self.seats:
            return
        require(len(self.seats) == 1 + len(self.branches), "an episode with seats lacks the seat of a sequence")
        require(all(0 < len(seat) <= MAX_SEAT and seat.isprintable() for seat in self.seats), "a seat has no name")
        parents = (self.seats[branch.parent] if branch.parent >= 0 else None for branch in self.branches)
        require(
            all(parent in (None, seat) for parent, seat in zip(parents, self.seats[1:], strict=True)),
            "a branch continues a sequence of another seat",
        )

    def _validate_alike(self) -> None:
        """Check that all sequences have a teacher's log-probabilities or none, and experts of one shape and type."""
        stored = (self, *self.branches)
        require(
            len({one.teacher_logprobs is None for one in stored}) == 1,
            "some sequences of an episode have a teacher's log-probabilities, others have none",
        )
        routed = [one.routed_experts for one in stored if one.routed_experts is not None]
        require(
            len({(experts.shape[1:], experts.dtype) for experts in routed}) <= 1,
            "the sequences of an episode have experts of different shapes",
        )


def _n_routed(one: StoredTokens) -> int:
    return 0 if one.routed_experts is None else len(one.routed_experts)


@dataclass(frozen=True, slots=True)
class Group:
    """All G episodes of one ticket, as they travel through the queue.

    A failed group has an error class and no trajectories. A group that the orchestrator filtered has no trajectories
    either, but a `rule`, and the reason as its failure. `rule` is absent on the wire if None. `judgements` are those of
    judges of the whole group, whose rewards the trajectories have; absent on the wire without.
    """

    ticket: int
    env: str
    task: str
    trajectories: tuple[Trajectory, ...]
    failure: str | None = None
    rule: FilterRule | None = None
    judgements: tuple[Judgement, ...] = ()

    def oldest(self) -> WeightVersion:
        return min(trajectory.oldest() for trajectory in self.trajectories)

    def teachers(self) -> set[WeightVersion]:
        """Return the versions of the run's weights that scored tokens as a teacher."""
        views = [trajectory.teacher_view for trajectory in self.trajectories if trajectory.teacher_view is not None]
        versions = {prompt.version for view in views for prompt in view.prompts}
        return {WeightVersion.parse(version) for version in versions if version is not None}

    def validate(self) -> None:
        """Check the group and its trajectories. Raises DecodeError naming the broken invariant."""
        require(bool(self.trajectories) != (self.failure is not None), "a group has either trajectories or a failure")
        require(self.rule is None or self.failure is not None, "a group with a filter rule lacks the reason")
        for trajectory in self.trajectories:
            require(trajectory.ticket == self.ticket, "a trajectory carries another ticket than its group")
            trajectory.validate()
        for judgement in self.judgements:
            judgement.validate(self.trajectories)

    def encode(self) -> bytes:
        """Encode the flat, versioned wire record (see shared.codec)."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["schema"] = SCHEMA
        record["trajectories"] = [_trajectory_record(t) for t in self.trajectories]
        if self.rule is None:
            del record["rule"]
        del record["judgements"]
        if self.judgements:
            record["judgements"] = [judgement.to_wire() for judgement in self.judgements]
        return codec.pack(record)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode and validate a group. Raises DecodeError for bytes that are not a valid group of this schema."""
        record = codec.unpack(data, "group", MAX_GROUP_OBJECTS)
        require(
            isinstance(record, dict) and repr(record.get("schema")) == str(SCHEMA), f"not a group of schema {SCHEMA}"
        )
        try:
            group = cls(
                ticket=read_int(record["ticket"]),
                env=read_text(record["env"]),
                task=read_text(record["task"]),
                trajectories=tuple(_trajectory(r) for r in record["trajectories"]),
                failure=None if record["failure"] is None else read_text(record["failure"]),
                rule=_rule(record.get("rule")),
                judgements=tuple(map(Judgement.from_wire, record.get("judgements", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"group lacks or mistypes a field: {error!r}"[:_MAX_DETAIL]) from error
        group.validate()
        return group


_ON_WIRE = {"sample_index": "sibling"}
"""Fields with another name on the wire and in archives."""


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    record = {_ON_WIRE.get(f.name, f.name): getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    for name in ("reward_components", "timings", "faults", "failures"):
        record[name] = dict(record[name])
    write_tokens(record, trajectory)
    del record["branches"], record["teacher_view"]
    if trajectory.teacher_view is not None:
        record["teacher_view"] = trajectory.teacher_view.to_wire()
    if trajectory.branches:
        record["branches"] = [branch_record(branch) for branch in trajectory.branches]
    del record["seats"]
    if trajectory.seats:
        record["seats"] = list(trajectory.seats)
    return record


def _trajectory(record: Any) -> Trajectory:
    if not isinstance(record, dict):
        raise TypeError(f"expected a trajectory, got {type(record).__name__}")
    return Trajectory(
        ticket=read_int(record["ticket"]),
        sample_index=read_int(record["sibling"]),
        attempt=read_int(record["attempt"]),
        env=read_text(record["env"]),
        task=read_text(record["task"]),
        prompt_len=read_int(record["prompt_len"]),
        reward=read_float(record["reward"]),
        success=bool(record["success"]),
        status=_status(record["status"]),
        reward_components={read_text(k): read_float(v) for k, v in record["reward_components"].items()},
        timings={read_text(k): read_float(v) for k, v in record["timings"].items()},
        end=_end(record.get("end")),
        faults=read_counts(record.get("faults", {})),
        failures=read_counts(record.get("failures", {})),
        branches=tuple(read_branch(one) for one in record.get("branches", ())),
        teacher_view=read_view(record.get("teacher_view")),
        seats=tuple(read_text(one) for one in record.get("seats", ())),
        **read_tokens(record),
    )


def _end(value: Any) -> End | None:
    if value is not None and read_text(value) not in ENDS:
        raise ValueError(f"unknown end {value!r}")
    return value


def _rule(value: Any) -> FilterRule | None:
    if value is not None and read_text(value) not in FILTERS:
        raise ValueError(f"unknown filter rule {value!r}")
    return value


def _status(value: Any) -> Status:
    if value == "completed" or value == "truncated":
        return value
    raise ValueError(f"unknown status {value!r}")
