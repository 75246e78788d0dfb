"""Train a planned fork: copy its start, and run the trainer's program until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError, StorageFull
from shared.run import commits
from shared.run.checksums import CHECKSUMS
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.supervised import supervised_steps
from volley.layout import variables_of
from volley.local import trainer_program
from volley.reporting import jsonl
from volley.reporting.lines import sft_line, step_line
from volley.runs.elapsed import counting
from volley.runs.record import RunClaim, claimed, mark_finished
from volley_proof.forks import fork_start, mending
from volley_proof.forks.plan import ForkPlan, check_existing
from volley_proof.reverify.service import environments_of
from volley_python.folder import forks
from volley_python.folder.forks import Fork

type Say = Callable[[str], None]
_MODULE = "volley_proof.replay.fork"
_SAME = 1e-4
"""Nats: largest difference in mean |log p(trainer) - log p(rollout)| of weights that were made again."""


def trained(plan: ForkPlan, say: Say) -> dict[str, Any]:
    """Start or resume the fork, and train it to its end. Returns {step, why}. Raises VolleyError."""
    folder, fork = plan.folder, plan.fork
    if folder.path.exists():
        check_existing(plan, Fork.read(folder))
    else:
        prepare(plan)
    if _step(folder) < fork.rebuilt:
        say(f"the fork has no checkpoint of step {fork.rebuilt}: it is trained again first")
        _run(plan, plan.base, fork.rebuilt, say)
    if (step := _step(folder)) >= fork.last:
        return {"step": step, "why": "it is trained already"}
    result = _run(plan, plan.loaded, fork.last, say)
    if (note := _differs(plan)) is not None:
        say(note)
    return result


def prepare(plan: ForkPlan) -> None:
    """Create the fork's folder completely or not at all. Raises VolleyError, also if the disk is full."""
    source = RunFolder(Path(plan.fork.source))
    try:
        with fork_start.draft(plan.folder) as target:
            fork_start.copy_environments(source, target)
            if plan.start is not None:
                fork_start.copy(plan.start, target, plan.folder.name)
            plan.fork.write(target)
    except StorageFull as error:
        raise ConfigError(
            f"{plan.folder.path} cannot be made: no space is left on its disk", "free some, or set run.dir=…"
        ) from error


def _step(folder: RunFolder) -> int:
    head: TrainerState | None = commits.newest(folder)
    return -1 if head is None else head.step


def _run(plan: ForkPlan, loaded: LoadedConfig, last: int, say: Say) -> dict[str, Any]:
    """Train up to step `last` with this configuration. Raises VolleyError."""
    free = forks.FREE if loaded is plan.loaded else ()
    with claimed(loaded, say, free) as claim:
        with counting(claim.folder, claim.record) as worked:
            result = asyncio.run(_worked(plan, claim, last, say))
        if result["step"] >= config.stored(claim.folder.path).config.trainer.max_steps:
            mark_finished(claim.folder, worked.record())
    return result


async def _worked(plan: ForkPlan, claim: RunClaim, last: int, say: Say) -> dict[str, Any]:
    run = config.stored(claim.folder.path).config
    arguments, variables = [str(claim.folder.path), "--last", str(last)], _variables(run.rollout.engine.device)
    needs_rewards = plan.fork.mended and last == plan.fork.last and not mending.is_complete(plan)
    needs_data = supervised_steps(run) and commits.newest(claim.folder) is None

    def show(line: Mapping[str, Any]) -> None:
        if text := format_line(line, run.trainer.max_steps):
            say(text)

    if not (needs_rewards or needs_data):
        return await asyncio.to_thread(trainer_program.run, _MODULE, arguments, variables, show)
    async with environments_of(claim.folder) as environments:
        if needs_rewards:
            await mending.mend(plan, environments, say)
        arguments += ["--env-url", environments.base_url]
        return await asyncio.to_thread(trainer_program.run, _MODULE, arguments, variables, show)


def _variables(device: str) -> dict[str, str]:
    return variables_of("trainer", cpu=device == "cpu")


def format_line(line: Mapping[str, Any], max_steps: int) -> str | None:
    """Return a line of the program for people; None for one that is not shown."""
    if "waiting" in line:
        return None if line["waiting"] is None else f"waiting: {line['waiting']}"
    if line.get("kind") == "step":
        return f"{step_line(line, max_steps)}  effective share {line['effective_share']:.3f}"
    return sft_line(line) if line.get("kind") == "warm_start" else None


def _differs(plan: ForkPlan) -> str | None:
    """Describe how weights that were made again differ from the run's, if they do.

    The checksums of the last step that was trained again are compared; at step 0 the log-probabilities of the first
    groups.
    """
    if plan.start is not None:
        return None
    first, at = plan.fork.rebuilt, max(1, plan.fork.rebuilt)
    ours, theirs = (_line(folder, at) for folder in (plan.folder, RunFolder(Path(plan.fork.source))))
    if ours is None or theirs is None:
        return None
    if first:
        same = ours.get(CHECKSUMS) == theirs.get(CHECKSUMS)
    else:
        same = abs(ours["logprob_abs_diff"] - theirs["logprob_abs_diff"]) <= _SAME
    if same:
        return None
    return f"note: the weights of step {first}, made again, are not bit for bit those of run {plan.fork.run}"


def evaluations(folder: RunFolder) -> Sequence[Mapping[str, Any]]:
    """Return the lines of evals.jsonl."""
    return jsonl.read(folder.evals)


def _line(folder: RunFolder, step: int) -> Mapping[str, Any] | None:
    head = commits.newest(folder)
    rows = [row for row in jsonl.read(folder.metrics) if row.get("step") == step]
    return rows[-1] if rows and head is not None else None
