"""The proof as a whole, and how it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from services.cli import jsonl
from services.cli.layout import RunFolder
from services.cli.verify import checkpoints, groups, queue, tickets
from services.cli.verify.groups import Bounds
from services.cli.verify.violation import Kind, Violation
from shared import config
from shared.errors import ConfigError, DecodeError
from shared.state import TrainerState, maker
from shared.types import WeightVersion

type Result = dict[str, Any]


def main(run_dir: Path, as_json: bool) -> int:
    """Prints the result; 0 if nothing is violated, else 1. Raises ConfigError if the folder is not that of a run."""
    folder = RunFolder(run_dir.absolute())
    if not folder.config.exists():
        raise ConfigError(f"{run_dir} is not the folder of a run", "it holds no config.yaml")
    result = verify(folder)
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() if as_json else told(result))
    return 0 if result["ok"] else 1


def verify(folder: RunFolder) -> Result:
    """Everything that can be proven now; `violations` names the rest. Raises ConfigError."""
    run = config.load([folder.config]).config
    batch, name = run.trainer.groups_per_step, run.run.name
    seen = asyncio.run(queue.ask(folder, name))
    found, violations = checkpoints.retained(folder.checkpoints, name)
    lines, unreadable = tickets.read(folder.ledger)
    violations += unreadable
    aside = checkpoints.set_aside(folder.checkpoints)
    if not found:
        nothing = Violation(Kind.CHECKPOINT, "there is no whole checkpoint, so nothing is durable", file=folder.checkpoints.name)
        return _result([*violations, nothing], None, {"set_aside": aside})
    head = found[-1].state
    violations += _metrics(folder.metrics, head)
    lines = tickets.with_pending(lines, head)
    fates = tickets.fates(lines, head)
    violations += checkpoints.check(found, folder.checkpoints, batch)
    violations += tickets.check(lines, fates, head, batch)
    bounds = Bounds(name, run.grpo_config.off_policy_steps, run.grpo_config.num_generations)
    violations += groups.check(folder.archive, fates.steps, head, bounds)
    differing = [] if isinstance(seen, str) else queue.check(seen, head, fates.n_trained.keys() | fates.voids.keys())
    about = {
        "head": str(head.version),
        "checkpoints": len(found),
        "undone": [{key: line[key] for key in ("ticket", "step", "epoch")} for line in fates.undone],
        "set_aside": aside,
        "superseded_archives": [str(version) for version in groups.superseded(folder.archive, head)],
        "redis": seen if isinstance(seen, str) else "differs" if differing else "agrees",
    }
    return _result([*violations, *differing], fates, about)


def told(result: Result) -> str:
    """For people: a line on what was proven, then a line a violation."""
    ends = ", ".join(f"{n} {end}" for end, n in sorted(result["by_disposition"].items())) or "none"
    lines = [
        f"tickets: {result['tickets']} ({ends}); lost: {result['lost']}; doubly trained: {result['doubly_trained']}",
        *(f"{name.replace('_', ' ')}: {result[name]}" for name in ("head", "checkpoints", "redis") if name in result),
        *(f"set aside: {version}: {reason}" for version, reason in result["set_aside"].items()),
        *(f"undone: ticket {x['ticket']}, step {x['step']} of epoch {x['epoch']}" for x in result.get("undone", ())),
        *(f"VIOLATION {Violation(**{**x, 'kind': Kind(x['kind'])})}" for x in result["violations"]),
    ]
    return "\n".join([*lines, "proven" if result["ok"] else f"NOT PROVEN: {len(result['violations'])} violations"])


def _result(violations: list[Violation], fates: tickets.Fates | None, about: Result) -> Result:
    counts = fates.by_disposition() if fates else {}
    return {
        "ok": not violations,
        "tickets": sum(counts.values()),
        "by_disposition": counts,
        "lost": _tickets(violations, Kind.LOST),
        "doubly_trained": _tickets(violations, Kind.DOUBLY_TRAINED),
        "violations": [asdict(violation) for violation in violations],
        **about,
    }


def _metrics(path: Path, head: TrainerState) -> list[Violation]:
    """Lines of versions that no ancestor made are of steps that were undone, or of a trainer that woke up after it was replaced."""
    try:
        versions = [WeightVersion.parse(str(row.get("version"))) for row in jsonl.read(path)]
    except DecodeError as error:
        return [Violation(Kind.METRICS, error.detail, file=path.name)]
    steps = [version.step for version in versions if maker(version.step, head.lineage) == version.epoch]
    ascending = all(a < b for a, b in pairwise(steps))
    return [] if ascending else [Violation(Kind.METRICS, "the steps of its lines do not ascend", file=path.name)]


def _tickets(violations: Iterable[Violation], kind: Kind) -> int:
    return len({violation.ticket for violation in violations if violation.kind == kind})
