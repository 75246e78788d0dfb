"""The ledger of a run, `ledger.jsonl`: what became of every ticket. Here is its meaning; the trainer alone writes it.

Invariants: a line is durable before the queue is told of it; a `rollback` line of epoch n undoes the `trained` lines
before it that are of later steps and of epochs below n, so a replaced trainer that wakes up undoes nothing of its
successor; of several lines of a ticket the highest epoch's counts, because an older trainer may still write before the
queue fences it; the same end twice is one end, because its successor may have written what it meant to write.
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
"""Values, and commas, of a line that is looked at; one has 25."""
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
    """One disposition.

    Args:
        version: of the weights that trained the group made, or that the trainer had when the ticket ended without
            training.
        versions: the oldest and the newest that sampled its tokens.
        reason: for people; cut after 1,000 characters, because readers cut long lines.
        rule: which filter it was, of a `filtered` ticket; written as the beginning of the reason (see `rule_of`).
        digest: blake3 of the group's wire bytes, which the archive holds if it was trained, and `refused/` if it is
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


def end_named(one: Mapping[str, Any]) -> str:
    """The disposition of a line, with the rule of one that was filtered: `filtered(zero_variance)`."""
    rule = rule_of(one)
    return str(one["disposition"]) if rule is None else f"{FILTERED}({rule})"


def rule_of(one: Mapping[str, Any]) -> FilterRule | None:
    """Which filter ended the ticket of this line; None if none did, or one that this version does not know."""
    named = str(one.get("reason") or "").partition(":")[0] if one["disposition"] == FILTERED else ""
    return next((rule for rule in FILTERS if rule == named), None)


def rollback(step: int, epoch: int) -> Line:
    """Undoes what trainers before `epoch` trained after `step`."""
    return {"rollback": step, "epoch": epoch}


def parse(text: bytes) -> Line | None:
    """One line of the file; None if it is not of the ledger."""
    try:
        return checked(codec.from_record(text, "a line of a ledger", _MOST_VALUES))
    except DecodeError:
        return None


def checked(value: Any) -> Line:
    """The value of a line. Raises DecodeError if it is none of the ledger's, or says more than one: what it holds is
    bounded.
    """
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
    """`version` says the same as epoch and step, and `versions` are two of them, the older first."""
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
    """The lines that no later `rollback` undoes, in order, each end once, without the rollbacks."""
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
    """Those that matter, by ascending step and ascending epoch: of two, the one to the earlier step by the later epoch
    undoes all that the other does.
    """

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
        """Whether one goes back to before `step` by an epoch after `epoch`."""
        at = bisect_left(self._steps, step)
        return at > 0 and self._epochs[at - 1] > epoch


def end_of(one: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two lines tell the same end."""
    get = one.get
    return get("ticket"), get("disposition"), get("epoch"), get("step"), get("digest")


def settled(lines: Iterable[Line]) -> dict[int, Line]:
    """The disposition of every ticket that has one."""
    last: dict[int, Line] = {}
    for one in surviving(lines):
        if one["epoch"] >= last.get(one["ticket"], one)["epoch"]:
            last[one["ticket"]] = one
    return last


def same(found: Mapping[str, Any] | None, one: Mapping[str, Any]) -> bool:
    """Whether two lines tell the same end of a ticket."""
    return found is not None and all(found[key] == one[key] for key in ("disposition", "epoch", "step"))
