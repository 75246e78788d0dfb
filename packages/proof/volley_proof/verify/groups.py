"""Compare the archive with the ledger.

Each step has its recorded groups, fresh enough and of this lineage; a fork's may be of the lineage of its log. A group
that decodes stores each sampled token of its episodes once, branches included (see shared.types); a step with branches
trained each once if its line of metrics counts as many tokens as the episodes have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import DecodeError
from shared.run import archive
from shared.run.archive import Spend
from shared.run.ledger import Line
from shared.run.lineage import epoch_of, in_lineage, in_log, until
from shared.run.mixture import TicketAssignment
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from volley_proof.verify.records import Metrics
from volley_proof.verify.violation import Violation, ViolationKind

_MOST_MISSING = 1000
_EXACT, _ROUNDING = 2**24, 1e-6
"""The trainer adds tokens as float32: exact up to this number, and within this relative error above."""


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """Bounds on the groups of a run.

    `max_staleness`: in steps. `group_size`: most episodes of a group. `assignment`: environment of each ticket up to
    `last_ticket`. `spend`: called with the bytes that archives unpack to. `metrics`: lines of metrics by step.
    """

    run: str
    max_staleness: int
    group_size: int
    assignment: TicketAssignment
    last_ticket: int
    spend: Spend
    metrics: Metrics


@dataclass(slots=True)
class _SampledTokens:
    """Sampled tokens of a step's groups: all, and those of episodes that were not truncated."""

    every: int = 0
    untruncated: int = 0
    has_branches: bool = False

    def add(self, group: Group) -> None:
        for one in group.trajectories:
            self.every += one.n_sampled
            self.untruncated += one.n_sampled * (one.status != "truncated")
            self.has_branches |= bool(one.branches)

    def differs(self, trained: object) -> tuple[ViolationKind, str] | None:
        """Compare with the number of trained tokens in the step's metrics, for a step with branches.

        Tokens of truncated episodes may be left out (`algorithm.mask_truncated`).
        """
        if not self.has_branches or not isinstance(trained, int | float):
            return None
        if any(math.isclose(trained, n, rel_tol=_ROUNDING * (n > _EXACT)) for n in (self.every, self.untruncated)):
            return None
        detail = f"its episodes have {self.every} sampled tokens, but metrics.jsonl counts {trained} trained ones"
        return (ViolationKind.DOUBLY_TRAINED if trained > self.every else ViolationKind.METRICS), detail


def check(root: Path, steps: dict[int, list[Line]], head: TrainerState, bounds: GroupBounds) -> Iterator[Violation]:
    """Check each step, reading one group at a time. The ledger's check reports steps without lines."""
    seen: dict[int, int] = {}
    for step in range(1, min(head.step, max(steps, default=0), len(steps) + _MOST_MISSING) + 1):
        epoch = epoch_of(step, head.lineage)
        if epoch is not None:
            yield from _step(root, WeightVersion(epoch, step), steps.get(step, []), head, bounds, seen)


def superseded(root: Path, head: TrainerState) -> list[WeightVersion]:
    """Archived steps that no surviving checkpoint contains."""
    return [v for v in archive.versions(root) if v.step > head.step or epoch_of(v.step, head.lineage) != v.epoch]


def _step(
    root: Path,
    version: WeightVersion,
    lines: Sequence[Line],
    head: TrainerState,
    bounds: GroupBounds,
    seen: dict[int, int],
) -> Iterator[Violation]:
    file = archive.path_of(Path(root.name), version).as_posix()
    of_ticket = {line["ticket"]: line for line in lines}
    tickets, here, sampled = list[int](), set[int](), _SampledTokens()
    try:
        for payload in archive.read(root, bounds.run, version, bounds.spend):
            group = _decoded(payload)
            if len(tickets) > 2 * len(lines) + _MOST_MISSING:
                raise DecodeError(f"has more than {len(tickets)} groups, but the ledger has {len(lines)}")
            if isinstance(group, DecodeError):
                yield Violation(
                    ViolationKind.GROUP, f"group {len(tickets)}: {group.detail}", step=version.step, file=file
                )
                tickets.append(0)
                continue
            ticket, line = group.ticket, of_ticket.get(group.ticket)
            found = list(_group(group, version, line, head, bounds))
            if line is not None and line.get("digest") != archive.digest(payload):
                found.append((ViolationKind.DIGEST, "the archived group is not the one in the ledger"))
            if ticket in here or seen.setdefault(ticket, version.step) != version.step:
                found.append((ViolationKind.DOUBLY_TRAINED, f"archived at steps {seen[ticket]} and {version.step}"))
            tickets.append(ticket)
            here.add(ticket)
            sampled.add(group)
            yield from (Violation(kind, detail, ticket, version.step, file) for kind, detail in found)
    except DecodeError as error:
        yield Violation(ViolationKind.ARCHIVE, error.detail, step=version.step, file=file)
        return
    expected = [line["ticket"] for line in lines]
    if tickets != expected:
        yield Violation(
            ViolationKind.ARCHIVE,
            f"holds tickets {tickets[:20]}, the ledger says {expected[:20]}",
            step=version.step,
            file=file,
        )
    elif (differs := sampled.differs(bounds.metrics.get(version.step, {}).get("tokens"))) is not None:
        yield Violation(*differs, step=version.step, file=file)


def _decoded(payload: bytes) -> Group | DecodeError:
    try:
        return Group.decode(payload)
    except DecodeError as error:
        return error


def _group(
    group: Group, made: WeightVersion, line: Line | None, head: TrainerState, bounds: GroupBounds
) -> Iterator[tuple[ViolationKind, str]]:
    """Check one group; `made` is the version of the weights trained on it."""
    if group.failure is not None or len(group.trajectories) > bounds.group_size:
        yield ViolationKind.GROUP, f"{len(group.trajectories)} episodes, failure {group.failure}"
        return
    if 0 < group.ticket <= bounds.last_ticket and group.env != (env := bounds.assignment.of(group.ticket).env):
        yield ViolationKind.MIXTURE, f"its environment is {group.env[:80]!r}, but by the mixture it is {env!r}"
    sampled = sorted({WeightVersion.parse(span.version) for t in group.trajectories for span in t.all_spans()})
    present, ancestors = made.step - 1, until(made.epoch, head.lineage)
    forks = [fork for fork in head.forks if fork.step < made.step]
    for version in sampled:
        if present - version.step > bounds.max_staleness:
            yield (
                ViolationKind.STALENESS,
                f"tokens of {version} were {present - version.step} steps old, allowed are {bounds.max_staleness}",
            )
        if (version.step > present or not in_lineage(version, ancestors)) and not in_log(version, forks):
            yield ViolationKind.LINEAGE, f"tokens of {version}, which is not an ancestor of {made}"
    for version in sorted(group.teachers()):
        if (version.step > present or not in_lineage(version, ancestors)) and not in_log(version, forks):
            yield ViolationKind.LINEAGE, f"its teacher was {version}, which is not an ancestor of {made}"
    named = line and line["ticket"] == group.ticket and line.get("versions")
    if named and named != [str(sampled[0]), str(sampled[-1])]:
        yield (
            ViolationKind.LEDGER,
            f"the ledger says its tokens are of {named}, they are of {[str(sampled[0]), str(sampled[-1])]}",
        )
