"""Compare the ledger with the newest checkpoint.

Each finished ticket has one disposition, each step its groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

from shared.files.reading import whole_lines
from shared.run import archive, counted, ledger
from shared.run.ledger import TRAINED, Line
from shared.run.pinned import MAX_STEPS
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_proof.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind

_MOST_STEPS = 50
_MOST_BAD = 100_000
"""Number of invalid lines after which reading stops."""
_SHARED = ("disposition", "version")


@dataclass(frozen=True, slots=True)
class TicketFates:
    """Ends of the tickets along the lineage of one checkpoint.

    `steps`: trained lines of each step, in order. `voids`: the valid line of each ticket that ended without training.
    `undone`: trained lines whose effect is in no durable checkpoint of the lineage.
    """

    steps: dict[int, list[Line]]
    voids: dict[int, Line]
    undone: list[Line]

    @property
    def n_trained(self) -> Counter[int]:
        """How often each ticket was trained."""
        return Counter(line["ticket"] for lines in self.steps.values() for line in lines)

    def by_disposition(self) -> dict[str, int]:
        trained = self.n_trained
        counts = Counter(ledger.disposition_label(line) for ticket, line in self.voids.items() if ticket not in trained)
        return dict(Counter({TRAINED: len(trained)}) + counts)


def read(path: Path) -> tuple[list[Line], list[Violation]]:
    """Complete lines of the file; an incomplete last line is being written, or was never acknowledged."""
    lines, bad, interned = list[Line](), list[Violation](), dict[str, str]()
    n_bad = 0
    try:
        for number, text in enumerate(whole_lines(path), start=1):
            line = ledger.parse(text)
            if line is not None:
                lines.append(_compact(line, interned))
                continue
            if not text.strip():
                continue  # an incomplete line that was blanked
            n_bad += 1
            if n_bad > _MOST_BAD:
                break
            if n_bad <= MOST_OF_A_KIND:
                bad.append(Violation(ViolationKind.LEDGER, f"line {number} is not a line of a ledger", file=path.name))
    except OSError as error:
        bad.append(Violation(ViolationKind.LEDGER, f"it cannot be read: {error.strerror}", file=path.name))
    if n_bad > MOST_OF_A_KIND:
        more = n_bad - MOST_OF_A_KIND
        bad.append(
            Violation(ViolationKind.LEDGER, f"and {more} more are not lines of a ledger", file=path.name, n=more)
        )
    return lines, bad


def _compact(line: Line, interned: dict[str, str]) -> Line:
    """Share equal texts between lines in memory: a ledger may have millions."""
    for key in _SHARED:
        if isinstance(text := line.get(key), str):
            line[key] = interned.setdefault(text, text)
    if isinstance(versions := line.get("versions"), list):
        line["versions"] = [interned.setdefault(text, text) for text in versions]
    return line


def fates(lines: Sequence[Line], head: TrainerState) -> TicketFates:
    steps: dict[int, list[Line]] = defaultdict(list)
    voids: dict[int, Line] = {}
    surviving = ledger.surviving(lines)
    undone = _rolled_back(lines, surviving) if any("rollback" in line for line in lines) else []
    for line in surviving:
        if line["disposition"] != TRAINED:
            if line["epoch"] >= voids.get(line["ticket"], line)["epoch"]:
                voids[line["ticket"]] = line
        elif counted.is_step(WeightVersion(line["epoch"], line["step"]), head):
            steps[line["step"]].append(line)
        else:
            undone.append(line)
    return TicketFates(dict(steps), voids, undone)


def _rolled_back(lines: Sequence[Line], surviving: Sequence[Line]) -> list[Line]:
    kept = {ledger.end_of(line) for line in surviving}
    trained = {ledger.end_of(line): line for line in lines if line.get("disposition") == TRAINED}
    return [line for end, line in trained.items() if end not in kept]


def check(lines: Sequence[Line], found: TicketFates, head: TrainerState, groups_per_step: int) -> Iterator[Violation]:
    yield from _lost(found, head)
    yield from _twice(lines, found)
    yield from _unknown(found, head)
    yield from _voids(found, head)
    yield from _steps(found, head, groups_per_step)


def _lost(found: TicketFates, head: TrainerState) -> list[Violation]:
    return lost(found.n_trained.keys() | found.voids.keys(), head.low, head.done, "finished without a disposition")


def lost(known: Set[int], low: int, done: Iterable[int], detail: str) -> list[Violation]:
    """Violations for tickets up to `low`, or in `done`, that are not in `known`. `low` may be huge: only the first are
    named.
    """
    n = low - sum(1 <= ticket <= low for ticket in known) + sum(ticket not in known for ticket in done)
    missing = (ticket for ticket in chain(range(1, low + 1), done) if ticket not in known)
    named = [
        Violation(ViolationKind.LOST, detail, ticket=ticket) for ticket in islice(missing, min(n, MOST_OF_A_KIND - 1))
    ]
    return [
        *named,
        *(
            [Violation(ViolationKind.LOST, f"and {n - len(named)} more: {detail}", n=n - len(named))]
            if n > len(named)
            else []
        ),
    ]


def _twice(lines: Sequence[Line], found: TicketFates) -> list[Violation]:
    violations = []
    more_than_once = {ticket: list[int]() for ticket, n in found.n_trained.items() if n > 1}
    for step, trained in sorted(found.steps.items()):
        for line in trained:
            if line["ticket"] in more_than_once:
                more_than_once[line["ticket"]].append(step)
    for ticket, steps in sorted(more_than_once.items()):
        trained_at = f"trained at steps {steps[:_MOST_STEPS]}"
        violations.append(Violation(ViolationKind.DOUBLY_TRAINED, trained_at, ticket=ticket))
    for step, trained in sorted(found.steps.items()):
        for line in trained:
            void = found.voids.get(line["ticket"])
            if void is not None and void["epoch"] >= line["epoch"]:
                violations.append(
                    Violation(
                        ViolationKind.TWO_DISPOSITIONS,
                        f"trained and {void['disposition']}",
                        ticket=line["ticket"],
                        step=step,
                    )
                )
    voids = Counter((x["ticket"], x["epoch"]) for x in ledger.surviving(lines) if x["disposition"] != TRAINED)
    for (ticket, epoch), n in sorted(voids.items()):
        if n > 1:
            violations.append(
                Violation(ViolationKind.TWO_DISPOSITIONS, f"ended {n} times in epoch {epoch}", ticket=ticket)
            )
    return violations


def _unknown(found: TicketFates, head: TrainerState) -> list[Violation]:
    """Tickets that ended before the checkpoint but are unfinished in it; those that ended later may be missing."""
    progress = head.progress()
    before = [line for lines in found.steps.values() for line in lines]
    before += [line for line in found.voids.values() if line["epoch"] == head.epoch and line["step"] < head.step]
    return [
        Violation(
            ViolationKind.NOT_IN_CHECKPOINT,
            f"{x['disposition']}, but unfinished in {head.version}",
            ticket=x["ticket"],
            step=x["step"],
        )
        for x in before
        if not progress.is_finished(x["ticket"])
    ]


@dataclass(frozen=True, slots=True)
class LedgerReach:
    """Bounds on epoch, step and ticket of valid lines, including those of trainers that made no checkpoint.

    `claimed`: epochs in the archive. `step`: newest step that the archive holds without a gap after the newest
    checkpoint. `ahead`: tickets that may be issued before a further step is durable.
    """

    claimed: Set[int]
    step: int
    ahead: int

    @classmethod
    def of(cls, root: Path, head: TrainerState, max_staleness: int, groups_per_step: int) -> LedgerReach:
        archived, step = {version.step for version in archive.versions(root)}, head.step
        while step + 1 in archived:
            step += 1
        return cls(archive.epochs(root), step, (step - head.step + max_staleness + 1) * groups_per_step)


def beyond(lines: Iterable[Line], found: TicketFates, head: TrainerState, reach: LedgerReach) -> Iterator[Violation]:
    """Yield lines that no trainer of the run can have written: of an unknown epoch, step or ticket.

    A ticket that ends without training is replaced by another one. After the last step no ticket is open, unless the
    run was shortened while some were.
    """
    most = head.issued + reach.ahead + len(found.voids)
    last = head.issued if head.phase == "done" and not _shortened(head) else most
    n = 0
    for line in lines:
        epoch, ticket = line["epoch"], line.get("ticket")
        step = line.get("step", 0)
        bound = last if epoch <= head.epoch and line.get("disposition") != TRAINED else most
        known = 1 <= epoch <= head.epoch or epoch in reach.claimed
        if known and step <= reach.step and (ticket is None or 1 <= ticket <= bound):
            continue
        n += 1
        if n > MOST_OF_A_KIND:
            continue
        if not known:
            yield Violation(
                ViolationKind.LEDGER, f"a line of epoch {epoch}, which no trainer had", ticket, step, "ledger.jsonl"
            )
        elif step > reach.step:
            yield Violation(
                ViolationKind.LEDGER, f"the newest step that was made is {reach.step}", ticket, step, "ledger.jsonl"
            )
        else:
            yield Violation(
                ViolationKind.NOT_IN_CHECKPOINT, f"{line['disposition']}, but {head.issued} tickets were issued", ticket
            )
    if n > MOST_OF_A_KIND:
        more = n - MOST_OF_A_KIND
        yield Violation(
            ViolationKind.LEDGER,
            f"and {more} more that no trainer of the run can have written",
            file="ledger.jsonl",
            n=more,
        )


def _shortened(head: TrainerState) -> bool:
    most = [flat[MAX_STEPS] for _, flat in head.settings if isinstance(flat.get(MAX_STEPS), int)]
    return any(now < was for was, now in pairwise(most))


def _voids(found: TicketFates, head: TrainerState) -> list[Violation]:
    progress, trained = head.progress(), found.n_trained
    n = sum(progress.is_finished(ticket) and ticket not in trained for ticket in found.voids)
    if n == head.void:
        return []
    return [
        Violation(
            ViolationKind.STATE,
            f"{head.version} counts {head.void} tickets without training, the ledger {n}",
            step=head.step,
        )
    ]


def _steps(found: TicketFates, head: TrainerState, groups_per_step: int) -> list[Violation]:
    last = min(head.step, last_step(found))
    counts = {step: len(found.steps.get(step, ())) for step in range(1, last + 1)}
    beyond = (
        [Violation(ViolationKind.STEP, f"no groups in the ledger from this step to {head.step}", step=last + 1)]
        if last < head.step
        else []
    )
    return beyond + [
        Violation(ViolationKind.STEP, f"{n} groups in the ledger, expected {groups_per_step}", step=step)
        for step, n in counts.items()
        if n != groups_per_step
    ]


def last_step(found: TicketFates) -> int:
    """Newest step in the ledger, bounded by its number of steps: a line may claim any number."""
    return min(max(found.steps, default=0), 2 * len(found.steps) + MOST_OF_A_KIND)
