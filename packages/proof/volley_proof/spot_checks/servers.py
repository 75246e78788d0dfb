"""Judgement of rollout servers by tokens that the trainer has scored again.

Two figures of each server, over its newest checked episodes:

- *ratio*: mean |log p(server) - log p(exact)| by the mean rounding noise of the trainer's own arithmetic on the same
  tokens. Both depend on the tokens alike, so that the ratio of right weights is near 1 in any dtype, for any tokens and
  any truncation of sampling.
- *excess*: by how much the mean -log p(exact) of its tokens exceeds the mean entropy of the distributions that they
  were drawn from, as a share of it. For each token the expected difference is 0 given the tokens before it, so their
  sum is a martingale. Truncated sampling and filters shift it for all servers alike, so a server is compared with the
  others. The last token of each turn does not count: short episodes come sooner, and are all that comes in time from a
  slow server; that a turn ended early is the surprise of its last token.

Standard errors are those of ratios of sums over episodes, which are independent, unlike their tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shared.run.rounding import FLOOR, MEAN_LIMIT

_WINDOW, _RATIO_WINDOW = 128, 32
"""Newest episodes that count for the excess, and for the ratio."""
_LEAST_EPISODES, _LEAST_TOKENS = 4, 64
_SIGMAS = 3.0
_MOST_RATIO = 10 * MEAN_LIMIT
"""An episode counts as if its ratio were no larger, else one wild number would hide all others in its error."""
_EXCESS, _EXCESS_SIGMAS, _EXCESS_EPISODES = 0.15, 5.0, 16
_FORGOTTEN = 50
"""Checks without a token of a server after which it is forgotten."""

type Fault = Literal["log-probabilities", "sampling"]


@dataclass(frozen=True, slots=True)
class ServerTokens:
    """Tokens of one episode that one server sampled with one version; sums over them in nats.

    `difference` is that of the server from exact arithmetic, `noise` that of the trainer's own; both absolute.
    `surprise` sums -log p of the tokens, `entropy` the entropies of their distributions, computed exactly, both without
    the last token of each turn.
    """

    server: str
    version: str
    n: int
    difference: float
    noise: float
    surprise: float
    entropy: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A server that computes something else than the weights it names: its fault, and the first version of it."""

    fault: Fault
    since: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Ratio of two sums over episodes, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
        """Estimate from at least two episodes; the denominators' sum is positive (else NaN)."""
        a, b = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
        if len(a) < 2 or not b.sum() > 0:
            return cls(math.nan, math.nan)
        value = a.sum() / b.sum()
        error = math.sqrt(np.square(a - value * b).sum() * len(a) / (len(a) - 1)) / b.sum()
        return cls(float(value), error)


class ServerRecords:
    """Checked episodes by server, and the servers that are suspected.

    `truncated`: the run samples from a part of the vocabulary (top_p, top_k), so that right servers' excess is not 0.
    """

    def __init__(self, *, truncated: bool = False) -> None:
        self._truncated = truncated
        self._checked: dict[str, deque[ServerTokens]] = {}
        self._latest, self._n_checks, self._checked_at = dict[str, int](), 0, dict[str, int]()
        self.suspected: Mapping[str, Suspicion] = {}

    def add(self, found: Iterable[ServerTokens]) -> None:
        """Add the episodes of a check and judge all servers again."""
        self._latest, self._n_checks = {}, self._n_checks + 1
        for one in found:
            self._latest[one.server] = self._latest.get(one.server, 0) + one.n
            self._checked.setdefault(one.server, deque(maxlen=_WINDOW)).append(one)
            self._checked_at[one.server] = self._n_checks
        for server in [one for one, at in self._checked_at.items() if at <= self._n_checks - _FORGOTTEN]:
            del self._checked[server], self._checked_at[server]
        self.suspected = self._judged()

    def ratio(self, server: str) -> Estimate:
        """Compute the server's ratio."""
        return _ratio(self._recent(server), math.inf)

    def describe(self, server: str) -> dict[str, Any]:
        """Return `url`, `tokens` of the last check, and figures of the window, in nats a token; `fault` if any."""
        recent = self._recent(server)
        n = sum(one.n for one in recent)
        ratio, excess = self.ratio(server).value, _excess(self._checked[server]).value
        about: dict[str, Any] = {
            "url": server,
            "tokens": self._latest.get(server, 0),
            "difference": sum(one.difference for one in recent) / n,
            "noise": sum(one.noise for one in recent) / n,
            "ratio": ratio if math.isfinite(ratio) else None,
            "excess": excess if math.isfinite(excess) else None,
        }
        if (suspicion := self.suspected.get(server)) is not None:
            about |= {"fault": suspicion.fault, "since": suspicion.since}
        return about

    def of_line(self) -> dict[str, Any]:
        """Return the fields of the step's line of metrics.jsonl: the servers of the last check, and the suspected."""
        shown = [self.describe(server) for server in sorted(self._latest.keys() | self.suspected.keys())]
        ratios = [one["ratio"] for one in shown if one["ratio"] is not None]
        return {"spot_checks": shown, "spot_check_ratio": max(ratios, default=None)}

    def describe_all(self) -> list[dict[str, Any]]:
        return [self.describe(server) for server in sorted(self._checked)]

    def _recent(self, server: str) -> list[ServerTokens]:
        return list(self._checked[server])[-_RATIO_WINDOW:]

    def _judged(self) -> dict[str, Suspicion]:
        made = {
            server: Suspicion("log-probabilities", since) for server in self._checked if (since := self._off(server))
        }
        sound = {server: found for server, found in self._checked.items() if server not in made}
        known = {server: _excess(found) for server, found in sound.items() if len(found) >= _EXCESS_EPISODES}
        for server in _different(known, truncated=self._truncated):
            made[server] = Suspicion("sampling", sound[server][0].version)
        return made

    def _off(self, server: str) -> str | None:
        """Return the first version in the window with a ratio above the limit, if the window's surely is."""
        recent = self._recent(server)
        if len(recent) < _LEAST_EPISODES or sum(one.n for one in recent) < _LEAST_TOKENS:
            return None
        ratio = _ratio(recent, _MOST_RATIO)
        if not ratio.value - _SIGMAS * ratio.error > MEAN_LIMIT:
            return None
        return next(one.version for one in recent if one.difference > MEAN_LIMIT * _noise(one))


def _noise(one: ServerTokens) -> float:
    return max(one.noise, FLOOR * one.n)


def _ratio(found: Sequence[ServerTokens], most: float) -> Estimate:
    return Estimate.of([min(one.difference, most * _noise(one)) for one in found], [_noise(one) for one in found])


def _excess(found: Sequence[ServerTokens]) -> Estimate:
    return Estimate.of([one.surprise - one.entropy for one in found], [one.entropy for one in found])


def _different(known: Mapping[str, Estimate], *, truncated: bool) -> list[str]:
    """Return the servers whose excess differs from the middle ones; of two, the one further from 0.

    With truncated sampling either of two may be the wrong one, and none is named.
    """
    ranked = sorted((one for one in known.values() if math.isfinite(one.value)), key=lambda one: abs(one.value))
    if len(ranked) == 2 and not truncated:
        middle = ranked[:1]
    else:
        ranked.sort(key=lambda one: one.value)
        middle = [ranked[i // 2] for i in (len(ranked) - 1, len(ranked))] if ranked else []
    return [server for server, its in known.items() if middle and all(_are_apart(its, one) for one in middle)]


def _are_apart(one: Estimate, other: Estimate) -> bool:
    return abs(one.value - other.value) > max(_EXCESS, _EXCESS_SIGMAS * math.hypot(one.error, other.error))
