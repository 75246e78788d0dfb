"""Ledger of a run, `ledger.jsonl`: the disposition of every ticket. Only the trainer writes it.

Invariants:
- A line is durable before the queue is updated.
- A `rollback` line of epoch n undoes earlier `trained` lines of later steps and of epochs below n, so a replaced
trainer that resumes undoes nothing of its successor.
- Of several lines of a ticket the highest epoch's counts, because an older trainer may still write before the queue
  fences it.
- Two lines with the same end count as one: a successor may have written what its predecessor was about to write.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from shared import codec
from shared.errors import DecodeError
from shared.outcomes import FILTERS, FilterRule
from shared.types import WeightVersion

TRAINED, NONFINITE, FILTERED = "trained", "nonfinite", "filtered"
DISPOSITIONS = (TRAINED, "stale", FILTERED, "failed", "poison", "superseded", NONFINITE)
_MOST = 2**53
_MOST_REASON = 1000
_TEXT_OR_NONE = (str, type(None))
_MOST_VALUES = 200
"""Largest number of values and commas in a valid line; a ledger line has 25."""
_KEYS = frozenset(("ticket", "disposition", "step", "epoch", "version", "versions", "reason", "digest"))
_ROLLBACK_KEYS = frozenset(("rollback", "epoch"))

type Line = dict[str, Any]


def line(
    ticket: int,
    disposition: str,
    version: WeightVersion,
    *,
    versions: tuple[WeightVersion, WeightVersion] | None = None,
    reason: str | None = None,
    rule: FilterRule | None = None,
    digest: str | None = None,
) -> Line:
    """Return the line of one disposition.

    Args:
        version: the version that training on the group made, or the trainer's version when the ticket ended without
    training.
        versions: the oldest and the newest that sampled its tokens.
        reason: for people; cut after 1,000 characters, because readers cut long lines.
        rule: the filter of a `filtered` ticket, written as a prefix of the reason (see `rule_of`).
        digest: blake3 of the group's wire bytes, which are in the archive if it was trained, and in `refused/` if it is
    `nonfinite`.
    """
    reason = reason if rule is None else f"{rule}: {reason}"
    return {
        "ticket": ticket,
        "disposition": disposition,
        "step": version.step,
        "epoch": version.epoch,
        "version": str(version),
        "versions": [str(v) for v in versions] if versions else None,
        "reason": None if reason is None else reason[:_MOST_REASON],
        "digest": digest,
    }


def disposition_label(one: Mapping[str, Any]) -> str:
    """Return the disposition of a line, with the filter if there is one: `filtered(zero_variance)`."""
    rule = rule_of(one)
    return str(one["disposition"]) if rule is None else f"{FILTERED}({rule})"


def rule_of(one: Mapping[str, Any]) -> FilterRule | None:
    """Return the filter that ended the ticket; None without one, or if this version does not know it."""
    named = str(one.get("reason") or "").partition(":")[0] if one["disposition"] == FILTERED else ""
    return next((rule for rule in FILTERS if rule == named), None)


def rollback(step: int, epoch: int) -> Line:
    """Return a line that undoes what trainers before `epoch` trained after `step`."""
    return {"rollback": step, "epoch": epoch}


def parse(text: bytes) -> Line | None:
    """Parse one line of the file; None if it is not a ledger line."""
    try:
        return checked(codec.from_record(text, "a line of a ledger", _MOST_VALUES))
    except DecodeError:
        return None


def checked(value: Any) -> Line:
    """Return a ledger line. Raises DecodeError for anything else, and for fields of unexpected type or size."""
    if not isinstance(value, dict):
        raise DecodeError("not a line of a ledger")
    if "rollback" in value:
        good = value.keys() == _ROLLBACK_KEYS and _is_count(value["rollback"]) and _is_count(value["epoch"])
    else:
        get = value.get
        typed = _is_count(get("ticket")) and _is_count(get("step")) and _is_count(get("epoch"))
        plain = isinstance(get("reason"), _TEXT_OR_NONE) and isinstance(get("digest"), _TEXT_OR_NONE)
        good = (
            value.keys() <= _KEYS
            and typed
            and plain
            and value.get("disposition") in DISPOSITIONS
            and _versions_fit(value)
        )
    if not good:
        raise DecodeError("not a line of a ledger")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _versions_fit(value: Mapping[str, Any]) -> bool:
    """True if `version` agrees with epoch and step, and `versions` is a pair, the older one first."""
    sampled = value.get("versions")
    if value.get("version") != f"e{value['epoch']:06d}-s{value['step']:06d}":
        return False
    if sampled is None:
        return True
    if not isinstance(sampled, list) or len(sampled) != 2 or not all(isinstance(v, str) for v in sampled):
        return False
    try:
        return WeightVersion.parse(sampled[0]) <= WeightVersion.parse(sampled[1])
    except DecodeError:
        return False


def surviving(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that no later `rollback` undoes, in order, each end once, without the rollbacks."""
    alive, rollbacks = list[Line](), _Rollbacks()
    for one in reversed(list(lines)):
        if "rollback" in one:
            rollbacks.add(one["rollback"], one["epoch"])
        elif one["disposition"] != TRAINED or not rollbacks.undo(one["step"], one["epoch"]):
            alive.append(one)
    kept: dict[tuple[Any, ...], Line] = {}
    for one in reversed(alive):
        kept.setdefault(end_of(one), one)
    return list(kept.values())


class _Rollbacks:
    """Effective rollbacks, by ascending step and epoch; one to an earlier step by a later epoch subsumes the others."""

    def __init__(self) -> None:
        self._steps, self._epochs = list[int](), list[int]()

    def add(self, step: int, epoch: int) -> None:
        at = bisect_right(self._steps, step)
        if at and self._epochs[at - 1] >= epoch:
            return
        start = bisect_left(self._steps, step)
        end = bisect_right(self._epochs, epoch)
        self._steps[start : max(start, end)] = [step]
        self._epochs[start : max(start, end)] = [epoch]

    def undo(self, step: int, epoch: int) -> bool:
        """True if a rollback of an epoch after `epoch` goes back to before `step`."""
        at = bisect_left(self._steps, step)
        return at > 0 and self._epochs[at - 1] > epoch


def end_of(one: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify an end; two lines that agree on them are one."""
    get = one.get
    return get("ticket"), get("disposition"), get("epoch"), get("step"), get("digest")


def settled(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the disposition of every ticket that has one."""
    last: dict[int, Line] = {}
    for one in surviving(lines):
        if one["epoch"] >= last.get(one["ticket"], one)["epoch"]:
            last[one["ticket"]] = one
    return last


def same(found: Mapping[str, Any] | None, one: Mapping[str, Any]) -> bool:
    """True if two lines record the same end of a ticket."""
    return found is not None and all(found[key] == one[key] for key in ("disposition", "epoch", "step"))
