"""Sequences of an episode: their tokens, versions and turns, the rules that they keep, and their wire records."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from shared import routing
from shared.errors import DecodeError, Untrainable
from shared.fields import read_array, read_float, read_int, read_text
from shared.outcomes import FILTERS, FilterRule

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


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled positions [start, end), the weights that sampled them, and the server's URL (empty if not recorded)."""

    version: str
    start: int
    end: int
    server: str = ""

    def moved(self, by: int) -> VersionSpan:
        """Return the span `by` positions later."""
        return VersionSpan(self.version, self.start + by, self.end + by, self.server)

    def to_wire(self) -> list[Any]:
        """Encode as [version, start, end], followed by the server if it is known."""
        return [self.version, self.start, self.end, *([self.server] if self.server else [])]

    @classmethod
    def from_wire(cls, row: Any) -> VersionSpan:
        """Decode a row. Raises TypeError, ValueError."""
        version, start, end, *server = row
        if len(server) > 1:
            raise ValueError(f"a version span has {len(row)} fields")
        return cls(read_text(version), read_int(start), read_int(end), *map(read_text, server))


@dataclass(frozen=True, slots=True)
class Turn:
    """Positions [start, end) of one message, and the environment's reward for it."""

    start: int
    end: int
    role: str
    reward: float = 0.0


class StoredTokens(Protocol):
    """The tokens that a sequence stores, of a trajectory or a branch."""

    @property
    def token_ids(self) -> np.ndarray: ...
    @property
    def loss_mask(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def versions(self) -> tuple[VersionSpan, ...]: ...
    @property
    def turns(self) -> tuple[Turn, ...]: ...
    @property
    def teacher_logprobs(self) -> np.ndarray | None: ...
    @property
    def routed_experts(self) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True)
class Branch:
    """A further sequence of an episode: its own tokens, which follow the first `shared` tokens of sequence `parent`.

    Sequence 0 is the trajectory's own, sequence i is `branches[i - 1]`; a parent is an earlier sequence, or -1 with
    `shared` 0 for a sequence that begins by itself. The arrays are those of `Trajectory` for the n own tokens alone;
    positions in `versions` and `turns` are those of the whole sequence. `routed_experts` continues after the positions
    of the shared part whose experts are known.
    """

    parent: int
    shared: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    teacher_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class EpisodeSequence:
    """One whole sequence of an episode; arrays as in `Trajectory`, `parent` as in `Branch`.

    The first `shared` tokens belong to earlier sequences: their mask and log-probabilities are 0 here, and `versions`
    and `turns` have only those of the sequence's own tokens.
    """

    parent: int
    shared: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    teacher_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    @property
    def n_sampled(self) -> int:
        return int(self.loss_mask.sum())


def whole(parent: EpisodeSequence | None, branch: Branch) -> EpisodeSequence:
    """Put a branch after the tokens that it shares with its parent."""
    n = branch.shared
    nothing = np.zeros(n, np.float32)

    def joined(before: np.ndarray | None, own: np.ndarray | None) -> np.ndarray | None:
        return own if before is None or not n else before[:n] if own is None else np.concatenate([before[:n], own])

    return EpisodeSequence(
        branch.parent,
        n,
        branch.token_ids if parent is None else np.concatenate([parent.token_ids[:n], branch.token_ids]),
        np.concatenate([np.zeros(n, np.uint8), branch.loss_mask]),
        np.concatenate([nothing, branch.logprobs]),
        branch.versions,
        branch.turns,
        None if branch.teacher_logprobs is None else np.concatenate([nothing, branch.teacher_logprobs]),
        joined(None if parent is None else parent.routed_experts, branch.routed_experts),
    )


def validate_tokens(one: StoredTokens, start: int, sample_index: int) -> None:
    """Check the tokens that a sequence stores, which are at positions [start, end) of the whole sequence."""
    n = len(one.token_ids)
    end = start + n
    require(n == len(one.loss_mask) == len(one.logprobs), "token_ids, loss_mask and logprobs differ in length")
    require(one.token_ids.dtype == np.int32 and bool((one.token_ids >= 0).all()), "token_ids are not ids")
    require(bool((one.loss_mask <= 1).all()), "loss_mask holds something else than 0 and 1")
    sampled = one.loss_mask.astype(bool)
    for logprobs in (one.logprobs, one.teacher_logprobs):
        _validate_logprobs(logprobs, sampled, sample_index)
    routed = one.routed_experts
    require(routed is None or len(routed) <= end, "there are experts of more positions than there are")
    covered = np.zeros(n, bool)
    for span in one.versions:
        WeightVersion.parse(span.version)
        require(start <= span.start < span.end <= end, "a version span is empty or outside the sequence")
        at = slice(span.start - start, span.end - start)
        require(not covered[at].any(), "version spans overlap")
        covered[at] = True
    require(bool((covered == sampled).all()), "version spans do not cover exactly the sampled tokens")


def validate_turns(turns: Sequence[Turn], start: int, end: int) -> None:
    """Check that turns lie at [start, end). Raises DecodeError."""
    require(all(start <= turn.start <= turn.end <= end for turn in turns), "a turn lies outside the sequence")


def _validate_logprobs(logprobs: np.ndarray | None, sampled: np.ndarray, sample_index: int) -> None:
    if logprobs is None:
        return
    require(len(logprobs) == len(sampled), "token_ids and a teacher's log-probabilities differ in length")
    require_trainable(bool(np.isfinite(logprobs).all()), "nonfinite_logprob", sample_index)
    require(not logprobs[~sampled].any(), "a log-probability stands at a position that was not sampled")
    require(bool((logprobs <= 1e-3).all()), "a log-probability is positive")


def branch_record(branch: Branch) -> dict[str, Any]:
    """Encode a branch."""
    record = {f.name: getattr(branch, f.name) for f in dataclasses.fields(branch)}
    write_tokens(record, branch)
    return record


def write_tokens(record: dict[str, Any], one: StoredTokens) -> None:
    """Make the fields of a sequence's own tokens those of the wire."""
    record["versions"] = [span.to_wire() for span in one.versions]
    record["turns"] = [[t.start, t.end, t.role, t.reward] for t in one.turns]
    if one.teacher_logprobs is None:
        del record["teacher_logprobs"]
    del record["routed_experts"]
    if one.routed_experts is not None:
        record["routed_experts"] = routing.to_wire(one.routed_experts)


def read_branch(record: Any) -> Branch:
    """Decode a branch. Raises TypeError, KeyError or ValueError."""
    if not isinstance(record, dict):
        raise TypeError(f"expected a branch, got {type(record).__name__}")
    return Branch(parent=read_int(record["parent"]), shared=read_int(record["shared"]), **read_tokens(record))


def read_tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a sequence's own tokens."""
    return {
        "token_ids": read_array(record["token_ids"], "i4"),
        "loss_mask": read_array(record["loss_mask"], "u1"),
        "logprobs": read_array(record["logprobs"], "f4"),
        "versions": tuple(map(VersionSpan.from_wire, record["versions"])),
        "turns": tuple(
            Turn(read_int(a), read_int(b), read_text(role), read_float(reward))
            for a, b, role, reward in record["turns"]
        ),
        "teacher_logprobs": read_array(record["teacher_logprobs"], "f4") if "teacher_logprobs" in record else None,
        "routed_experts": routing.from_wire(record["routed_experts"]) if "routed_experts" in record else None,
    }


def spans(versions: Sequence[str], positions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Merge per-token versions at ascending positions into spans; a gap between positions ends a span."""
    out: list[VersionSpan] = []
    for version, position in zip(versions, positions, strict=True):
        add_span(out, VersionSpan(version, position, position + 1))
    return tuple(out)


def add_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span; extend the last one instead if it ends where this one starts, with the same weights and server."""
    last = spans[-1] if spans else None
    if last is not None and (last.version, last.server, last.end) == (span.version, span.server, span.start):
        spans[-1] = replace(last, end=span.end)
    else:
        spans.append(span)


def require(condition: bool, message: str) -> None:
    """Raise DecodeError with the message unless the condition holds."""
    if not condition:
        raise DecodeError(message)


def require_trainable(condition: bool, rule: FilterRule, sample_index: int) -> None:
    """Raise Untrainable, naming the episode, unless the condition holds."""
    if not condition:
        raise Untrainable(f"episode {sample_index}: {FILTERS[rule]}", rule=rule)
