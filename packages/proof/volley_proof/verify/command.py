"""`volley verify`: run all checks, and print the result."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from shared import config
from shared.engines import AS_REPORTED
from shared.errors import ConfigError
from shared.files.reading import whole_lines
from shared.run import archive, checkpoint_files, trust
from shared.run import commits as commit_records
from shared.run.archive import Spend
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.types import WeightVersion
from volley.printing import join_lines, print_result
from volley.proof import Proof, prove
from volley.reporting.working import Tell, silent, working
from volley.run_arguments import add_run_dir
from volley.runs.run_file import read_record
from volley_dashboard.report import engines
from volley_proof.verify import (
    budget,
    checkpoints,
    commits,
    configuration,
    data,
    groups,
    mixture,
    parameters,
    prefixes,
    queue,
    records,
    refusals,
    supervised,
    tickets,
    unfounded,
)
from volley_proof.verify.groups import GroupBounds
from volley_proof.verify.queue import QueueContents
from volley_proof.verify.violation import Violation, ViolationKind, ViolationList
from volley_python.folder import counted_lines, survey

_MOST_TOLD = 1000
_BEYOND = 10_000
"""Tickets that may be open in addition to those that have ended."""
type Result = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir)


def main(run_dir: Path) -> int:
    """Print the result. Exit code 0 if the folder is proven, else 1. Raises ConfigError if no package knows it."""
    with working("verifying") as tell:
        proof = prove(run_dir.absolute(), tell)
    if proof is None:
        RunFolder(run_dir).check()
        raise ConfigError(f"{run_dir}: no installed package can verify this folder")
    print_result(proof.result, proof.text)
    return 0 if proof.result["ok"] else 1


def prove_run(path: Path, tell: Tell = silent) -> Proof | None:
    """Check a run's folder; None for a folder without a configuration. Raises ConfigError."""
    folder = RunFolder(path)
    if not folder.config.exists():
        return None
    result = verify(folder, tell)
    return Proof(result, format_result(result))


def verify(folder: RunFolder, tell: Tell = silent) -> Result:
    """Run all checks; `violations` lists what they find, `reported` what only a server says. Raises ConfigError.

    Unless the folder is trusted, files that no run writes are reported before anything is read, and the work is bounded
    by the folder's bytes. `tell` gets the name of each part.
    """
    try:
        if trust.is_accepted(folder):
            return _proof(folder, budget.unbounded, tell)
        began = time.monotonic()
        with budget.bounded(budget.SURVEY):
            found = survey.look(folder)
        if found.problems:
            return _refused(*(Violation(ViolationKind.FOLDER, reason, file=name) for name, reason in found.problems))
        with budget.bounded(budget.allowed(found, time.monotonic() - began)):
            return _proof(folder, budget.UnpackingBudget(found.archives).spend, tell)
    except budget.OutOfTime as error:
        return _refused(Violation(ViolationKind.FOLDER, str(error)))
    except budget.NotFinished as error:
        return {**_refused(), "ok": False, "not_finished": str(error)}


def _refused(*violations: Violation) -> Result:
    """Result for a folder that is not read completely."""
    findings = ViolationList()
    findings.add(violations)
    return _result(findings, None, {"set_aside": {}, "redis": "not asked"})


def _proof(folder: RunFolder, spend: Spend, tell: Tell) -> Result:
    """Args: spend: called with the bytes that archives unpack to."""
    run = config.recorded(folder.config).config
    name = run.run.name
    seen = "there is no queue" if run.is_supervised else asyncio.run(queue.ask(folder, name))
    findings = ViolationList()
    tell("checkpoints")
    with checkpoint_files.hashing_once():
        found, violations = checkpoints.retained(folder.checkpoints, name)
    findings.add(violations)
    aside = checkpoints.set_aside(folder.checkpoints)
    if not found:
        return _without_checkpoint(folder, seen, findings, aside)
    if run.is_supervised:
        about = {"set_aside": aside, **supervised.verify(folder, run, found, findings)}
        return _result(findings, None, about)
    history = _History.read(folder, name, found, findings)
    tell("ledger")
    lines, unreadable = tickets.read(folder.ledger)
    findings.add(unreadable)
    lines = counted_lines.with_pending(lines, history.head)
    fates = tickets.fates(lines, history.head)
    tell("commit records and parameters")
    missing = _check_states(folder, run, history, fates, findings)
    findings.add(unfounded.check_ledger(lines, fates.undone, folder, name, history.head))
    findings.add(tickets.check(lines, fates, history.head, run.trainer.groups_per_step))
    reach = tickets.LedgerReach.of(
        folder.archive, history.head, run.grpo_config.off_policy_steps, run.trainer.groups_per_step
    )
    findings.add(tickets.beyond(lines, fates, history.head, reach))
    del lines
    tell("archived groups")
    _check_groups(folder, run, history, fates, findings, spend)
    settled = fates.n_trained.keys() | fates.voids.keys()
    differing = [] if isinstance(seen, str) else queue.check(seen, history.head, settled)
    findings.add(differing)
    about = {
        **_summary(folder, run, history, fates, missing),
        "set_aside": aside,
        "redis": seen if isinstance(seen, str) else "differs" if differing else "agrees",
    }
    return _result(findings, fates, about)


@dataclass(frozen=True, slots=True)
class _History:
    """States of a run: whole checkpoints, commit records, the newest state and those that it descends from.

    `saved` is the newest whole checkpoint among its ancestors; its epoch is 0 if there is none.
    """

    found: Sequence[checkpoints.RetainedCheckpoint]
    logged: Sequence[commit_records.CommitRecord]
    head: TrainerState
    ancestors: Sequence[TrainerState]
    saved: WeightVersion

    @classmethod
    def read(
        cls, folder: RunFolder, name: str, found: Sequence[checkpoints.RetainedCheckpoint], findings: ViolationList
    ) -> Self:
        logged, violations = commits.retained(folder, name)
        findings.add(violations)
        known = {one.version: one.state for one in (*logged, *found)}
        head = known[max(known)]
        older = [known[version] for version in sorted(known) if in_lineage(version, head.lineage)]
        ancestors = older if head in older[-1:] else [*older, head]  # its lineage may be another's
        whole = [one.version for one in found if in_lineage(one.version, head.lineage)]
        return cls(found, logged, head, ancestors, max(whole, default=WeightVersion(0, 0)))


def _check_states(
    folder: RunFolder, run: RunConfig, history: _History, fates: tickets.TicketFates, findings: ViolationList
) -> list[str]:
    """Check configuration, checkpoints, commit records and parameters; return those that cannot be checked."""
    found, logged, head, saved = history.found, history.logged, history.head, history.saved
    if not saved.epoch:
        detail = f"no whole checkpoint is an ancestor of {head.version}, the newest commit record"
        findings.add([Violation(ViolationKind.CHECKPOINT, detail, file=folder.checkpoints.name)])
    findings.add(configuration.check(folder, run, head, saved))
    findings.add(data.check(folder, run.data.env))
    findings.add(checkpoints.check(found, head, folder.checkpoints))
    findings.add(checkpoints.check_states(history.ancestors, folder.checkpoints, run.trainer.groups_per_step))
    findings.add(commits.check(logged, found, folder, head))
    gone = commits.missing_steps(logged, fates.undone, folder)
    findings.add(commits.as_violations(gone))
    findings.add(prefixes.check(folder, history.ancestors, found))
    foreign, missing = parameters.check(folder, found, logged)
    findings.add(foreign)
    findings.add(unfounded.check(folder, head, gone))
    return missing


def _check_groups(
    folder: RunFolder,
    run: RunConfig,
    history: _History,
    fates: tickets.TicketFates,
    findings: ViolationList,
    spend: Spend,
) -> None:
    """Check metrics, mixture, archived and refused groups."""
    metrics, unfit = records.read(folder.metrics, history.head)
    findings.add(unfit)
    findings.add(records.check(fates, metrics, history.ancestors))
    max_staleness = run.grpo_config.off_policy_steps
    last = len(fates.n_trained) + len(fates.voids) + max_staleness * run.trainer.groups_per_step + _BEYOND
    assignment, damaged = mixture.assigned(folder.mixture, run.data, last)
    findings.add(damaged)
    n_generations = run.grpo_config.num_generations
    bounds = GroupBounds(run.run.name, max_staleness, n_generations, assignment, last, spend, metrics)
    findings.add(groups.check(folder.archive, fates.steps, history.head, bounds))
    findings.add(refusals.check(folder, fates.voids.values(), run.run.name, spend))


def _summary(
    folder: RunFolder, run: RunConfig, history: _History, fates: tickets.TicketFates, missing: Sequence[str]
) -> Result:
    head = history.head
    superseded = groups.superseded(folder.archive, head)
    return {
        "head": str(head.version),
        "checkpoints": len(history.found),
        "logged": head.step - history.saved.step,
        "undone": [{key: line[key] for key in ("ticket", "step", "epoch")} for line in fates.undone[:_MOST_TOLD]],
        "not_checked": [
            *prefixes.replaced(folder, history.ancestors),
            *configuration.absent(folder, head),
            *commits.absent(history.logged, history.found, folder),
            *missing,
        ],
        "reported": engines.unproven(folder, run.rollout.engine.kind),
        "changed_data": data.changed(folder, run.data),
        "superseded_archives": [str(version) for version in superseded][:_MOST_TOLD],
    }


def _without_checkpoint(
    folder: RunFolder, seen: QueueContents | str, findings: ViolationList, aside: Mapping[str, str]
) -> Result:
    """Result for a run without a checkpoint: its other files may not claim any step."""
    claims = [file.name for file in (folder.ledger, folder.metrics, folder.refused) if _has_lines(file)]
    claims += [file.name for file in (folder.evals, folder.handovers) if _mentions_steps(file)]
    claims += [folder.archive.name] * bool(archive.versions(folder.archive) or commit_records.versions(folder.archive))
    record = read_record(folder)
    claims += [folder.record.name] * (record is not None and record.finished)
    claims += ["Redis"] * (not isinstance(seen, str) and bool(seen.state.version or seen.done))
    about = {
        "set_aside": aside,
        "redis": seen if isinstance(seen, str) else "differs" if "Redis" in claims else "agrees",
    }
    if not (claims or aside or findings.all()):
        return _result(findings, None, {**about, "steps": 0})
    detail = "there is no whole checkpoint, so nothing is durable"
    if claims:
        detail += f", but progress is recorded in {', '.join(claims)}"
    findings.add([Violation(ViolationKind.CHECKPOINT, detail, file=folder.checkpoints.name)])
    return _result(findings, None, about)


def _has_lines(file: Path) -> bool:
    return os.path.lexists(file) and (not file.is_file() or file.stat().st_size > 0)


def _mentions_steps(file: Path) -> bool:
    """Return True if a line is of a step after the first weights, or cannot be read."""
    try:
        return any(orjson.loads(line)["step"] for line in whole_lines(file) if line.strip())
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _read(violation: Mapping[str, Any]) -> Violation:
    return Violation(kind=ViolationKind(violation["kind"]), **{k: v for k, v in violation.items() if k != "kind"})


def format_result(result: Result) -> str:
    """Result as text: lines on what was proven, then one line per violation."""
    ends = ", ".join(f"{n} {end}" for end, n in sorted(result["by_disposition"].items())) or "none"
    about = f"tickets: {result['tickets']} ({ends}); lost: {result['lost']}; doubly trained: {result['doubly_trained']}"
    lines = [
        *([] if "data" in result else [about]),
        *(
            f"{name.replace('_', ' ')}: {result[name]}"
            for name in ("steps", "data", "head", "checkpoints", "redis")
            if name in result
        ),
        *(f"set aside: {version}: {reason}" for version, reason in result["set_aside"].items()),
        *(f"data changed since: {one}" for one in result.get("changed_data", ())),
        *(f"not checked: {one}" for one in result.get("not_checked", ())),
        *(f"reported: {one}" for one in result.get("reported", ())),
        *(f"undone: ticket {x['ticket']}, step {x['step']} of epoch {x['epoch']}" for x in result.get("undone", ())),
        *(f"VIOLATION {_read(x)}" for x in result["violations"]),
    ]
    return join_lines([*lines, _verdict(result)])


def _verdict(result: Mapping[str, Any]) -> str:
    if (why := result.get("not_finished")) is not None:
        return f"NOT FINISHED: {why}"
    if not result["ok"]:
        return f"NOT PROVEN: {len(result['violations'])} violations"
    n = result["by_disposition"].get("trained", 0)
    about = f"proven: {n} group{'s'[: n != 1]}, each trained exactly once" if n else "proven: nothing was trained"
    if "data" in result:  # supervised: no groups
        about = "proven"
    return f"{about}, with {AS_REPORTED}" if result.get("reported") else about


def _result(findings: ViolationList, fates: tickets.TicketFates | None, about: Result) -> Result:
    counts, violations = fates.by_disposition() if fates else {}, findings.all()
    return {
        "ok": not violations,
        "tickets": sum(counts.values()),
        "by_disposition": counts,
        "lost": findings.tickets(ViolationKind.LOST),
        "doubly_trained": findings.tickets(ViolationKind.DOUBLY_TRAINED),
        "violations": [asdict(violation) for violation in violations],
        **about,
    }
