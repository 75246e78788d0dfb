"""Verify a supervised run.

Each step has one line, made by an ancestor of the newest checkpoint, and each checkpoint's place in the data matches
its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.supervised import supervised_steps
from volley_proof.verify import configuration, prefixes, records, unfounded
from volley_proof.verify.checkpoints import RetainedCheckpoint
from volley_proof.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind, ViolationList

_KEPT = ("loss", "grad_norm", "tokens", "eval_loss")


def verify(
    folder: RunFolder, run: RunConfig, found: Sequence[RetainedCheckpoint], findings: ViolationList
) -> Mapping[str, Any]:
    """Add to the findings, and return the result's fields. `found` is not empty."""
    head = found[-1].state
    findings.add(configuration.check(folder, run, head, head.version))
    lines, unfit = records.read(folder.sft, head)
    findings.add(unfit)
    findings.add(_lines(lines, found, folder.sft.name))
    findings.add(prefixes.check(folder, [one.state for one in found if in_lineage(one.version, head.lineage)], found))
    if head.phase == "done":
        findings.add(unfounded.check_supervised(folder, head))
    steps = supervised_steps(run)
    assert steps is not None
    for one in found:
        findings.add(_place(one.state, head, steps.batch_size))
    data = head.data or {}
    return {
        "head": str(head.version),
        "checkpoints": len(found),
        "steps": head.step,
        "data": f"{data.get('examples')} examples, digest {str(data.get('digest'))[:16]}, in pass {data.get('epoch')}",
    }


def _lines(lines: records.Metrics, found: Sequence[RetainedCheckpoint], file: str) -> Iterator[Violation]:
    head = found[-1].state
    missing = (step for step in range(1, head.step + 1) if step not in lines)
    for step in islice(missing, MOST_OF_A_KIND):  # a checkpoint may claim any step
        yield Violation(ViolationKind.METRICS, "its line is missing", step=step, file=file)
    for one in found:
        if not in_lineage(one.version, head.lineage):
            continue
        for kept in (line for line in one.state.metrics if line["step"]):
            line = lines.get(int(kept["step"]), {})
            if any(line.get(key) != kept.get(key) for key in _KEPT):
                detail = f"its line differs from the one in {one.version}"
                yield Violation(ViolationKind.METRICS, detail, step=int(kept["step"]), file=file)


def _place(state: TrainerState, head: TrainerState, batch_size: int) -> Iterator[Violation]:
    """Check a checkpoint's place in the data."""
    data, first = state.data, head.data
    if data is None or first is None:
        yield Violation(ViolationKind.STATE, f"{state.version} does not record its place in the data")
        return
    if any(data[key] != first[key] for key in ("digest", "examples")):
        yield Violation(ViolationKind.STATE, f"{state.version} and {head.version} are of different data")
    if data["epoch"] * data["examples"] + data["offset"] != state.step * batch_size:
        yield Violation(ViolationKind.STATE, f"{state.version} is at another place in the data than its step says")
