"""`volley eval`: evaluate a model on the held-out tasks of a configuration, without training.

Starts a temporary run and evaluates its version 0, as every run evaluates its first weights: the model's weights bit
by bit in float32, each task played once, greedily, with the configuration's seed. The same command gives the same
figures. The trainer only makes that version. The run's folder is removed afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models import origin
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services import SERVICES
from volley.commands import train
from volley.local import stack
from volley.local.preflight import check_inputs
from volley.local.signals import Stopped
from volley.local.supervisor import ServiceFailed
from volley.printing import is_json, print_lines, print_result
from volley.reporting import jsonl
from volley.reporting.display import shown
from volley.reporting.intervals import SuccessRate
from volley.reporting.progress import Activity, ProgressDisplay, print_text
from volley.run_arguments import add_trust
from volley.runs.answers import fetch_status
from volley.runs.record import claimed, dated, stored
from volley.runs.run_file import read_record, write_json
from volley_launch.scratch import scratch_folder

_NAME = "eval"
_POLL_S = 0.3
_TOLD_S = 10.0


def _alone() -> Mapping[str, Any]:
    """Overrides that detach the temporary run from the evaluated one: bucket, queue, servers and ports.

    No group is generated, because none is before an evaluation that stops training has ended.
    """
    return {
        "run.name": _NAME,
        "run.bucket": None,
        "mode": "rl",
        "orchestrator.generation.eval_share": None,
        "services.redis_url": None,
        **{f"services.{name}.port": 0 for name in SERVICES},
        **{f"services.{name}.url": None for name, info in SERVICES.items() if not info.shared},
        **{f"services.{name}_urls": [] for name, info in SERVICES.items() if info.replicated},
    }


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|RUN@VERSION|MODEL", help="a run's newest or given version, or a model")
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="configuration to evaluate with (default: the run's own); repeatable, later files win",
    )
    add_trust(parser)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the files")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="print the result, or the error, as JSON; with FILE, write the result there too, and print text",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(
        arguments.target,
        arguments.config or [],
        arguments.overrides,
        None if arguments.json is True else arguments.json,
    )


def main(
    target: str,
    paths: Sequence[str],
    overrides: Sequence[str],
    output: Path | None,
    seams: stack.StackSeams = stack.REAL,
) -> int:
    """Evaluate a run or a model.

    `target`: RUN (its newest version), RUN@VERSION, a model's folder or a hub id. Prints the result and writes it to
    `output` if given. Returns the exit code. Raises VolleyError.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(
            f"--json {output}: there is no folder {output.absolute().parent}", "name a file in an existing folder"
        )
    try:
        result, _ = measured(target, paths, overrides, seams)
    except Stopped as stopped:
        print_lines(f"stopped by {stopped}: nothing was measured")
        return stopped.exit_code
    if output is not None:
        write_json(output, result)
    if is_json():
        print_result(result)
    for row in () if is_json() else result["evaluations"]:
        print_text(format_evaluation(row, result["model"]))
    return 0


def measured(
    target: str, paths: Sequence[str] = (), overrides: Sequence[str] = (), seams: stack.StackSeams = stack.REAL
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Evaluate as `main`; return the result, and the lines of evals.jsonl of the temporary run.

    Raises Stopped, VolleyError.
    """
    loaded, source = _configured(target, paths, overrides)
    with _scratch(loaded) as folder:
        if source is not None and trust.is_own(source) and source.environments.is_dir():
            shutil.copytree(source.environments, folder / _NAME / "environments", symlinks=True)
        return _measured(config.changed(loaded, {"run.dir": str(folder)}), seams)


def format_evaluation(row: Mapping[str, Any], model: str) -> str:
    """Sentence on one environment's evaluation."""
    rate = SuccessRate(0, row["n_tasks"] - row["failed"], row["success"], row["low"], row["high"])
    failed = f", {row['failed']} tasks failed and are not counted" if row["failed"] else ""
    return (
        f"{row['env']}: success {rate}, 95 % interval in brackets; reward {row['reward_mean']:.3f},"
        f" {rate.tasks} held-out tasks, greedy{failed}; weights {model}"
    )


def _configured(target: str, paths: Sequence[str], overrides: Sequence[str]) -> tuple[LoadedConfig, RunFolder | None]:
    """Configuration to evaluate with, and the evaluated run, or None for a model. Raises ConfigError."""
    name, _, version = target.rpartition("@") if "@" in target and not Path(target).is_dir() else (target, "", "")
    run = RunFolder(Path(name).absolute())
    is_run = bool(version) or run.record.exists()
    if not paths and not is_run:
        raise ConfigError(
            f"{target} is not the folder of a run", f"{run.hint()}; to evaluate a model, give --config FILE.yaml"
        )
    if paths:
        loaded = config.rooted(config.load(paths, overrides), Path.cwd())
    else:
        trust.check(run)
        loaded, _ = stored(run.path, overrides)
    path = f"{run.path}@{version or origin.LATEST}" if is_run else target
    asked = any(override.startswith("model.initial_weights=") for override in overrides)
    weights = {} if asked else {"model.initial_weights": "folder"}
    if is_run:
        loaded = dated(loaded, read_record(run))
    cold = {key: value for key, value in loaded.tree.items() if key != "sft"}  # without a warm start
    changed = config.changed(replace(loaded, tree=cold), {"model.path": path, **weights, **_alone()})
    changed = config.rooted(changed, Path.cwd())
    check_inputs(changed)
    return changed, run if is_run else None


@contextmanager
def _scratch(loaded: LoadedConfig) -> Iterator[Path]:
    """Make a temporary folder next to the runs, on the disk that has room for checkpoints. Raises ConfigError."""
    beside = loaded.config.run.dir
    with ExitStack() as opened:
        try:
            beside.mkdir(parents=True, exist_ok=True)
            folder = opened.enter_context(scratch_folder(".eval-", beside))
        except OSError as error:
            raise ConfigError(f"run.dir={beside}: {error.strerror}", "choose another with run.dir=…") from error
        yield folder


def _measured(loaded: LoadedConfig, seams: stack.StackSeams) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Run the evaluation. Returns its rows with intervals, the model and the seed; and the rows as they are recorded.

    Raises Stopped, VolleyError.
    """
    with claimed(loaded) as claim, shown(loaded.config.trainer.max_steps) as display:
        train.supervise(
            loaded, claim, lambda running: _evaluated(running, display), display.say, seams, display.service
        )
        rows = jsonl.read(claim.folder.evals)
        found = claim.record.origin
    run, env = loaded.config.run, loaded.config.data.env
    result = {
        "model": f"{found['folder']}@{found['version']}" if found else loaded.config.model.path,
        "manifest": found["manifest"] if found else None,
        "seed": run.seed,
        "evaluations": [_row(row, str(row.get("env") or env)) for row in rows],
    }
    return result, list(rows)


def _row(row: Mapping[str, Any], env: str) -> dict[str, Any]:
    rate = SuccessRate.of(row)
    assert rate is not None
    kept = ("success", "n_tasks", "failed", "reward_mean", "turns_mean", "tokens", "ends", "elapsed_s")
    return {"env": env, "low": rate.low, "high": rate.high} | {key: row[key] for key in kept}


async def _evaluated(running: stack.LocalStack, display: ProgressDisplay) -> None:
    """Wait until version 0 is evaluated. Raises ServiceFailed if the run fails."""
    loop = asyncio.get_running_loop()
    told_at = loop.time()
    async with running.client("orchestrator") as orchestrator:
        while True:
            run = await fetch_status(orchestrator, f"/runs/{_NAME}")
            if any(row.get("env") is None for row in run.get("evaluations", ())):
                return
            if run.get("state") == "failed":
                raise ServiceFailed(f"nothing was measured: {run.get('reason')}")
            if display.detailed:
                display.activity(Activity(run))
            elif loop.time() - told_at > _TOLD_S:
                told_at = loop.time()
                done = run.get("evaluated")
                display.say(f"{done[0]} of {done[1]} tasks have ended" if done else str(run.get("reason")))
            await asyncio.sleep(_POLL_S)
