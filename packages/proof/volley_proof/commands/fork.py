"""`volley fork`: train a run's archived groups again under other settings, as a run of its own, without generating.

Another loss, filter or learning rate, or other rewards, on the tokens that were sampled already. The policy departs
from the one that sampled them, so a fork ends when too few of the tokens still count (the effective share).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from shared.files import storage
from shared.run import commits
from shared.run.folder import RunFolder
from volley.commands import train
from volley.printing import print_lines, print_result
from volley.run_arguments import add_run_dir, add_vary
from volley_commands import evaluate
from volley_dashboard.report import compare
from volley_proof.forks import training
from volley_proof.forks.plan import ForkPlan, Wanted, planned

_LEAST_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Then:
    """Actions after each fork: an evaluation on held-out tasks, or training with generation."""

    evaluate: bool = False
    live: bool = False


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="K", help="begin after step K (default: 0, the whole log)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="train N steps (default: to the end of the log)")
    parser.add_argument(
        "--least-share",
        type=float,
        default=_LEAST_SHARE,
        metavar="X",
        help=f"stop before a step whose effective share is below X (default: {_LEAST_SHARE}; 0: never)",
    )
    parser.add_argument(
        "--reverify",
        action="store_true",
        help="replay the episodes in today's environments, and train on these rewards (implied by data.rewards=…)",
    )
    parser.add_argument("--env", metavar="NAME", help="environment whose episodes are replayed in that of --by")
    parser.add_argument("--by", metavar="NAME", help="environment to replay them in, e.g. its next version NAME@2")
    add_vary(
        parser,
        "make a fork for each value, in sequence, e.g. --vary algorithm.name grpo dppo; repeatable. The KEY config"
        " has files, each with settings that win over the run's",
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate each fork on held-out tasks at its end")
    parser.add_argument("--live", action="store_true", help="go on generating after the log's end, as an ordinary run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of the fork")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    if (arguments.env is None) != (arguments.by is None):
        raise ConfigError("--env and --by belong together", "name the environment of the episodes, and its replacement")
    wanted = Wanted(
        arguments.first,
        arguments.steps,
        arguments.least_share,
        arguments.reverify or arguments.by is not None,
        {} if arguments.by is None else {arguments.env: arguments.by},
    )
    then = Then(arguments.evaluate, arguments.live)
    return main(arguments.run_dir, wanted, arguments.overrides, arguments.vary, then)


def main(
    run_dir: Path,
    wanted: Wanted,
    overrides: Sequence[str],
    variations: Sequence[Sequence[str]] = (),
    then: Then = Then(),
) -> int:
    """Train the forks in sequence, and compare them with the run. Returns the exit code. Raises VolleyError.

    All are planned before the first is trained, so a wrong setting of the last one is named at once.
    """
    if then.live and variations:
        raise ConfigError("--live and --vary cannot be combined", "continue one of the forks with `volley up` later")
    source = RunFolder(run_dir.absolute())
    plans = [planned(source, wanted, one, files) for one, files in varied(source.name, overrides, variations)]
    results = [_forked(plan, then) for plan in plans]
    if then.live:
        return train.resume(plans[0].folder.path, [])
    runs = compare.compared([source, *(plan.folder for plan in plans)])
    print_result(results, lambda: compare.table(runs))
    compare.draw(runs, plans[0].folder.path / "compare.png")
    return 0


def varied(
    run: str, overrides: Sequence[str], variations: Sequence[Sequence[str]]
) -> list[tuple[list[str], list[Path]]]:
    """Return overrides and configuration files of each fork; with variations, names are those of the values.

    Raises ConfigError.
    """
    named = next((one.partition("=")[2] for one in overrides if one.startswith("run.name=")), f"{run}-fork")
    made = list[tuple[list[str], list[Path]]]()
    for chosen in compare.combinations(variations):
        name = "-".join([named, *(compare.slug(key, value) for key, value in chosen)])
        settings = [f"{key}={value}" for key, value in chosen if key != compare.CONFIG]
        files = [Path(value) for key, value in chosen if key == compare.CONFIG]
        made.append(([*overrides, *settings, f"run.name={name}"], files))
    return made


def _forked(plan: ForkPlan, then: Then) -> Mapping[str, Any]:
    say = print_lines
    say(f"fork {plan.folder.name} of {plan.fork.run} from step {plan.fork.last_source_step} in {plan.folder.path}")
    result = training.trained(plan, say)
    say(f"{plan.folder.name} ended after step {result['step']}: {result['why']}")
    if then.evaluate:
        _evaluated(plan, say)
    return {"run": plan.folder.name, "folder": str(plan.folder.path), **result}


def _evaluated(plan: ForkPlan, say: training.Say) -> None:
    """Measure the fork's newest version, and record it in its evals.jsonl, unless it is there. Raises VolleyError."""
    folder, head = plan.folder, commits.newest(plan.folder)
    assert head is not None
    if any(line.get("step") == head.step for line in training.evaluations(folder)):
        return
    result, rows = evaluate.measured(str(folder.path))
    version = str(head.version)
    lines = [{**row, "step": head.step, "version_min": version, "version_max": version} for row in rows]
    storage.append(folder.evals, b"".join(orjson.dumps(line) + b"\n" for line in lines), durable=True)
    for row in result["evaluations"]:
        say(evaluate.format_evaluation(row, result["model"]))
