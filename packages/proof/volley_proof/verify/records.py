"""Verify metrics.jsonl and the chain.

No step's record is missing or changed since the checkpoints were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run import counted
from shared.run.chain import Chain
from shared.run.ledger import Line
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_proof.verify.tickets import TicketFates
from volley_proof.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind

_MOST_BAD = 10 * MOST_OF_A_KIND

type Metrics = dict[int, Mapping[str, Any]]


def read(path: Path, head: TrainerState) -> tuple[Metrics, list[Violation]]:
    """Lines of the lineage by step, including those that only the checkpoint holds because of a crash.

    Lines of other versions are left out: their steps were undone, or a replaced trainer wrote them late.
    """
    found: Metrics = {}
    violations, last = list[Violation](), 0

    def violated(detail: str, step: int | None = None) -> None:
        violations.append(Violation(ViolationKind.METRICS, detail, step=step, file=path.name))

    try:
        for number, text in enumerate(whole_lines(path), start=1):
            line, version = _parsed(text)
            if len(violations) >= _MOST_BAD:
                violated("the lines that follow are not read")
                break
            if line is None or version is None:
                violated(f"line {number} is not a line of metrics")
                continue
            if not counted.is_step(version, head):
                continue
            if version.step <= last:
                violated(f"line {number} is of step {version.step}, after step {last}", version.step)
            last = max(last, version.step)
            found[version.step] = line
    except OSError as error:
        violated(f"it cannot be read: {error.strerror}")
    for line in head.metrics:
        found.setdefault(WeightVersion.parse(str(line["version"])).step, line)
    return found, violations


def check(fates: TicketFates, metrics: Metrics, ancestors: Sequence[TrainerState]) -> Iterator[Violation]:
    """Check the chain of each retained checkpoint and record of the lineage, oldest first, and the lines it holds."""
    for state in ancestors:
        yield from _carried(state, fates, metrics)
    yield from _steps(fates, metrics, ancestors)


def _steps(fates: TicketFates, metrics: Metrics, states: Sequence[TrainerState]) -> Iterator[Violation]:
    """Recompute the chain up to the newest state.

    A fault lies between the last state that agrees and the first that differs.
    """
    now, agreed, holes, differs = Chain(), 0, list[int](), False
    expected = {state.step: state for state in states}
    for step in range(1, min(states[-1].step, _last(fates, metrics)) + 1):
        line = metrics.get(step)
        if line is None:
            holes.append(step)
        now = now.trained(fates.steps.get(step, ()), line or {})
        if differs or step not in expected:
            continue
        if now.steps == expected[step].chain.steps:
            agreed = step
        else:
            differs = True
            where = f"step {step}" if step == agreed + 1 else f"a step from {agreed + 1} to {step}"
            yield Violation(
                ViolationKind.CHAIN,
                f"ledger.jsonl or metrics.jsonl differ from what {expected[step].version} was made after, at {where}",
                step=step,
            )
    for step in holes:
        yield Violation(
            ViolationKind.METRICS, "metrics.jsonl has no line of this step", step=step, file="metrics.jsonl"
        )
    head = states[-1]
    progress, trained = head.progress(), fates.n_trained
    voids = [line for ticket, line in fates.voids.items() if progress.is_finished(ticket) and ticket not in trained]
    if Chain().ended(voids).voids != head.chain.voids:
        detail = (
            f"the tickets that ended without training in ledger.jsonl differ from "
            f"those that {head.version} was made after"
        )
        yield Violation(ViolationKind.CHAIN, detail, step=head.step, file="ledger.jsonl")


def _last(fates: TicketFates, metrics: Metrics) -> int:
    """Newest recorded step, but at most a hundred missing steps on: a checkpoint or line may claim any number."""
    return min(max([0, *fates.steps, *metrics]), len(fates.steps) + len(metrics) + MOST_OF_A_KIND)


def _carried(state: TrainerState, fates: TicketFates, metrics: Metrics) -> Iterator[Violation]:
    """Compare the files with the ledger lines and metrics that a state holds of its own step."""
    theirs: dict[int, list[Line]] = {}
    for line in state.recent:
        theirs.setdefault(line.get("step", 0), []).append(dict(line))
    for step, lines in theirs.items():
        of_ticket = {line["ticket"]: line for line in reversed(fates.steps.get(step, ()))}
        for one in lines:
            ours = of_ticket.get(one.get("ticket"))
            if ours is not None and ours != one:
                differing = ", ".join(key for key in one if ours.get(key) != one[key]) or "more than"
                yield Violation(
                    ViolationKind.LEDGER,
                    f"{differing} of its line differ from the one in {state.version}",
                    one["ticket"],
                    step,
                    "ledger.jsonl",
                )
            elif ours is None:
                yield Violation(
                    ViolationKind.LEDGER,
                    f"{state.version} says it was trained, ledger.jsonl does not",
                    one.get("ticket"),
                    step,
                    "ledger.jsonl",
                )
    for line in state.metrics:
        step = WeightVersion.parse(str(line["version"])).step
        ours = metrics.get(step)
        if ours is not None and ours != line:
            differing = ", ".join(sorted(key for key in {*line, *ours} if ours.get(key) != line.get(key)))[:200]
            yield Violation(
                ViolationKind.METRICS,
                f"{differing} differ from the line in {state.version}",
                step=step,
                file="metrics.jsonl",
            )


def _parsed(text: bytes) -> tuple[Mapping[str, Any] | None, WeightVersion | None]:
    try:
        line = codec.from_record(text, "a line of metrics", MAX_LINE_VALUES)
        version = WeightVersion.parse(line["version"])
        return (line, version) if line["step"] == version.step else (None, None)
    except (KeyError, TypeError, DecodeError):
        return None, None
