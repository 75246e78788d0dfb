"""Mixture of a run: a pure function from `mixture.jsonl` to the environment of each ticket.

A run starts with the mixture of its configuration. Every later change is a line of the file, in force from a ticket
that was not reserved when it was written.

Invariants:
- A ticket is the same task in any process and after any restart, whatever has joined or left: its environment and its
  ordinal (the n-th ticket of that environment) follow from the lines alone.
- Between two changes, after any number of tickets, each environment has its exact share to within one group.
- A run with one environment has ordinal = ticket.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, NamedTuple

import orjson

from shared import codec
from shared.data_schema import MAX_WEIGHT, MOST_ENVIRONMENTS
from shared.errors import DecodeError

_PARTS = 10_000
"""Weights are rounded to multiples of 1/_PARTS if exact ones need larger numbers; this bounds a mixture's period."""
_LONGEST_PERIOD = 2 * 10**6
MOST_CHANGES = 100_000
"""Largest number of lines read from an untrusted file."""
_MOST_WRONG = 100
_MOST_VALUES = 16 * MOST_ENVIRONMENTS
_MOST_TICKET = 2**53
_MAX_TEXT = 500

type Weights = Mapping[str, int]
"""Weights of environments, integers; an environment without one is not played."""


class Drawn(NamedTuple):
    """Assignment of a ticket: the `ordinal`-th group (from 1) of an environment in this run."""

    env: str
    ordinal: int


class SplitSizes(NamedTuple):
    """Number of training and evaluation tasks of an environment."""

    n_train: int
    n_eval: int


@dataclass(frozen=True, slots=True)
class MixtureChange:
    """One line of mixture.jsonl: the whole mixture from `from_ticket` on.

    `first` play the first tickets, one each, before the shares apply: new environments, and ones to retry.
    `sizes` are those of environments outside the configuration. `chosen` are weights that people set, by name without
    version, `suspended` reasons why an offered environment is not played, `factors` the curriculum's multipliers of
    the weights. `at` is Unix time.
    """

    from_ticket: int
    weights: Weights
    first: tuple[str, ...] = ()
    sizes: Mapping[str, SplitSizes] = field(default_factory=dict[str, SplitSizes])
    chosen: Mapping[str, float] = field(default_factory=dict[str, float])
    suspended: Mapping[str, str] = field(default_factory=dict[str, str])
    why: str = ""
    at: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict[str, float])

    def encode(self) -> bytes:
        """Return the line, with its newline."""
        record = {one.name: getattr(self, one.name) for one in fields(self)}
        record["sizes"] = {env: list(sizes) for env, sizes in self.sizes.items()}
        return orjson.dumps(record) + b"\n"

    def shares(self) -> dict[str, float]:
        total = sum(self.weights.values())
        return {env: weight / total for env, weight in self.weights.items()}


def whole_weights(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return the smallest whole numbers in the same proportion, without zeros; rounded if they exceed _PARTS."""
    positive = {env: weight for env, weight in sorted(weights.items()) if weight > 0}
    if not positive:
        return {}
    scale = math.lcm(*(weight.denominator for weight in positive.values()))
    whole = {env: int(weight * scale) for env, weight in positive.items()}
    total = sum(whole.values())
    if total // math.gcd(*whole.values()) > _PARTS:
        whole = {env: max(1, round(Fraction(weight * _PARTS, total))) for env, weight in whole.items()}
    divisor = math.gcd(*whole.values())
    return {env: weight // divisor for env, weight in whole.items()}


class TicketAssignment:
    """Environment of each ticket. Args: weights: of the configuration, in force from ticket 1."""

    def __init__(self, weights: Weights) -> None:
        self.current = MixtureChange(1, dict(weights))
        self.sizes: dict[str, SplitSizes] = {}
        self._segments = [_Segment(self.current, {})]
        self._starts = [1]

    def add(self, change: MixtureChange) -> None:
        """Add a later change. Raises DecodeError if it starts before the last one."""
        if change.from_ticket < self.current.from_ticket:
            raise DecodeError(f"a mixture from ticket {change.from_ticket} follows one from {self.current.from_ticket}")
        if change.from_ticket == self.current.from_ticket:  # no ticket of it was drawn
            self._starts.pop()
            played = self._segments.pop().before
        else:
            last = self._segments[-1]
            played = last.played(change.from_ticket - last.change.from_ticket)
        self.current = change
        self.sizes = {**change.sizes, **self.sizes}
        self._segments.append(_Segment(change, played))
        self._starts.append(change.from_ticket)

    def of(self, ticket: int) -> Drawn:
        """Return the assignment of a ticket. Args: ticket: at least 1."""
        segment = self._segment(ticket)
        return segment.drawn(ticket - segment.change.from_ticket)

    def counts(self, last: int) -> dict[str, int]:
        """Count the groups of each environment up to the ticket `last`."""
        segment = self._segment(max(1, last))
        return segment.played(last + 1 - segment.change.from_ticket)

    def _segment(self, ticket: int) -> _Segment:
        return self._segments[bisect_right(self._starts, ticket) - 1]


class _Segment:
    """Tickets between two changes. Args: before: groups of each environment before them."""

    def __init__(self, change: MixtureChange, before: Mapping[str, int]) -> None:
        self.change, self.before = change, before
        self._period = _Period(change.weights)

    def drawn(self, offset: int) -> Drawn:
        """Return the assignment at an offset. Args: offset: from 0."""
        first = self.change.first
        if offset < len(first):
            env, nth = first[offset], first[: offset + 1].count(first[offset])
        else:
            env, nth = self._period.at(offset - len(first))
            nth += first.count(env)
        return Drawn(env, self.before.get(env, 0) + nth)

    def played(self, n: int) -> dict[str, int]:
        """Count the groups of each environment up to the n-th ticket of this segment, earlier segments included."""
        first = self.change.first
        found = Counter(self.before)
        found.update(first[:n])
        found.update(self._period.counts(max(0, n - len(first))))
        return dict(found)


class _Period:
    """Periodic sequence of environments: after k draws each has been drawn k times its share, to within one.

    Its period is the sum of the weights. R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32
    (1980): of those whose count is behind by at least 1/(2n - 2), draw the one that would first be behind by more than
    1 - 1/(2n - 2). Ties go by name.
    """

    def __init__(self, weights: Weights) -> None:
        self._names = sorted(weights)
        self._weights = [weights[name] for name in self._names]
        self._total = sum(self._weights)
        self._counts = [0] * len(self._names)
        self._which, self._nth = array("H"), array("Q")  # for each position: index of the name, number of its draw

    def at(self, position: int) -> tuple[str, int]:
        """Return the environment at a position (from 0), and the number of its draw."""
        periods, rest = divmod(position, self._total)
        while len(self._which) <= rest:
            which = self._next()
            self._counts[which] += 1
            self._which.append(which)
            self._nth.append(self._counts[which])
        which = self._which[rest]
        return self._names[which], periods * self._weights[which] + self._nth[rest]

    def counts(self, n: int) -> dict[str, int]:
        """Count how often each is drawn in the first n."""
        periods, rest = divmod(n, self._total)
        if rest:
            self.at(rest - 1)
        partial = Counter(self._which[:rest])
        return {name: periods * self._weights[i] + partial[i] for i, name in enumerate(self._names)}

    def _next(self) -> int:
        n, total, k = len(self._names), self._total, len(self._which) + 1
        if n == 1:
            return 0
        parts = 2 * n - 2
        return min(
            (-(-(parts * count + parts - 1) * total // (parts * weight)), which)
            for which, (weight, count) in enumerate(zip(self._weights, self._counts, strict=True))
            if parts * (k * weight - count * total) >= total
        )[1]


def parse(text: bytes) -> MixtureChange:
    """Parse one line of mixture.jsonl. Raises DecodeError."""
    record = codec.from_record(text, "a line of a mixture", _MOST_VALUES)
    try:
        return MixtureChange(
            from_ticket=_whole(record["from_ticket"], 1, _MOST_TICKET),
            weights=_weights(record["weights"]),
            first=tuple(_name(name) for name in record.get("first", ())),
            sizes={_name(k): SplitSizes(_whole(a, 1), _whole(b, 0)) for k, (a, b) in record.get("sizes", {}).items()},
            chosen={_name(k): _weight(v) for k, v in record.get("chosen", {}).items()},
            suspended={_name(k): str(v)[:_MAX_TEXT] for k, v in record.get("suspended", {}).items()},
            factors={_name(k): _weight(v) for k, v in record.get("factors", {}).items()},
            why=str(record.get("why", ""))[:_MAX_TEXT],
            at=float(record.get("at", 0.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DecodeError(f"a line of mixture.jsonl lacks or mistypes a field: {error!r}"[:_MAX_TEXT]) from error


def replayed(assignment: TicketAssignment, lines: Iterable[bytes], until: int = _MOST_TICKET) -> list[str]:
    """Add the changes in whole lines of mixture.jsonl; skip invalid lines, and return up to a hundred reasons.

    Args:
        until: the last ticket that will be looked up; later changes are not needed.
    """
    wrong: list[str] = []
    for line in lines:
        if line.strip():
            try:
                change = parse(line)
                if change.from_ticket > until:
                    break
                assignment.add(change)
            except DecodeError as error:
                wrong.append(error.detail)
                if len(wrong) >= _MOST_WRONG:
                    break
    return wrong


def base_name(env: str) -> str:
    """Return the name without version: `adder` for `adder@2`."""
    return env.partition("@")[0]


def _weights(value: Any) -> dict[str, int]:
    if not value or len(value) > MOST_ENVIRONMENTS:
        raise ValueError(f"a mixture has at least one environment, at most {MOST_ENVIRONMENTS}")
    weights = {_name(name): _whole(weight, 1) for name, weight in value.items()}
    if sum(weights.values()) > _LONGEST_PERIOD:
        raise ValueError("the weights are too large")
    return weights


def _whole(value: Any, least: int, most: int = 2**62) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not a whole number of at least {least}")
    return value


def _weight(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_WEIGHT:
        raise ValueError(f"{value!r} is not a weight")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError("the name of an environment must be text of 1 to 200 characters")
    return value
