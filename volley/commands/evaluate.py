"""`volley eval`: how often a model solves the held-out tasks of a configuration, alone and without training.

What is measured is version 0 of a run of its own, whose folder is removed afterwards. So it is measured as every run
measures its first weights: those of the model bit by bit in float32, every token from exactly these, each task played
once, greedily, with the configuration's seed. The same command gives the same figures. The trainer is started to make
that version, and trains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from volley.local.supervisor import ServiceFailed
from volley.printing import print_lines
from volley.reporting import jsonl
from volley.reporting.display import shown
from volley.reporting.intervals import SuccessRate
from volley.reporting.progress import Activity, ProgressDisplay, print_text
from volley.run_arguments import add_trust
from volley.runs.answers import fetch_status
from volley.runs.record import claimed, dated, read_record, stored, write_json

_NAME = "eval"
_POLL_S = 0.3
_TOLD_S = 10.0


def _alone() -> Mapping[str, Any]:
    """Settings in the place of those of the run that is measured: its bucket, warm start, queue, servers and ports."""
    return {
        "run.name": _NAME,
        "run.bucket": None,
        "mode": "rl",
        "sft.max_steps": 0,
        "sft.epochs": None,
        "services.redis_url": None,
        **{f"services.{name}.port": 0 for name in SERVICES},
        **{f"services.{name}.url": None for name, info in SERVICES.items() if not info.shared},
        **{f"services.{name}_urls": [] for name, info in SERVICES.items() if info.replicated},
    }


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|RUN@VERSION|MODEL", help="RUN: its newest version")
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="on what, and how (default: the run's own); given again, the later file wins",
    )
    add_trust(parser)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that win over the files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.target, arguments.config or [], arguments.overrides, arguments.json)


def main(
    target: str,
    paths: Sequence[str],
    overrides: Sequence[str],
    output: Path | None,
    seams: stack.StackSeams = stack.REAL,
) -> int:
    """Measures a run's newest version (RUN), one of its versions (RUN@VERSION), a model's folder or a hub id. Prints
    the result and writes it to `output`, if one is given. Returns the exit code. Raises VolleyError.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--json {output}: there is no folder {output.absolute().parent}", "name a file in one")
    loaded, source = _configured(target, paths, overrides)
    try:
        with _scratch(loaded) as folder:
            if source is not None and trust.is_own(source) and source.environments.is_dir():
                shutil.copytree(source.environments, folder / _NAME / "environments", symlinks=True)
            result = _measured(config.changed(loaded, {"run.dir": str(folder)}), seams)
    except train.Stopped as stopped:
        print_lines(f"stopped by {stopped}: nothing was measured")
        return stopped.exit_code
    if output is not None:
        write_json(output, result)
    for row in result["evaluations"]:
        print_text(format_evaluation(row, result["model"]))
    return 0


def format_evaluation(row: Mapping[str, Any], model: str) -> str:
    """One environment, as a sentence."""
    rate = SuccessRate(0, row["n_tasks"] - row["failed"], row["success"], row["low"], row["high"])
    failed = f", {row['failed']} tasks failed and are not counted" if row["failed"] else ""
    return (
        f"{row['env']}: success {rate}, 95 % interval in brackets; reward {row['reward_mean']:.3f},"
        f" {rate.tasks} held-out tasks, greedy{failed}; weights {model}"
    )


def _configured(target: str, paths: Sequence[str], overrides: Sequence[str]) -> tuple[LoadedConfig, RunFolder | None]:
    """The configuration to measure with, and the run that is measured, if it is one. Raises ConfigError."""
    name, _, version = target.rpartition("@") if "@" in target and not Path(target).is_dir() else (target, "", "")
    run = RunFolder(Path(name).absolute())
    is_run = bool(version) or run.record.exists()
    if not paths and not is_run:
        raise ConfigError(f"{target} is not the folder of a run", "to measure a model, say on what: --config FILE.yaml")
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
    changed = config.changed(loaded, {"model.path": path, **weights, **_alone()})
    changed = config.rooted(changed, Path.cwd())
    train.check_inputs(changed)
    return changed, run if is_run else None


@contextmanager
def _scratch(loaded: LoadedConfig) -> Iterator[Path]:
    """A folder beside the runs, so that there is room for a checkpoint where there is room for theirs. Raises
    ConfigError.
    """
    beside = loaded.config.run.dir
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".eval-", dir=beside.absolute()))
    except OSError as error:
        raise ConfigError(f"run.dir={beside}: {error.strerror}", "choose another with run.dir=…") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(loaded: LoadedConfig, seams: stack.StackSeams) -> dict[str, Any]:
    """The lines of evals.jsonl with their intervals, and what was measured with what. Raises Stopped, VolleyError."""
    with claimed(loaded) as claim, shown(loaded.config.trainer.max_steps) as display:
        train.supervise(
            loaded, claim, lambda running: _evaluated(running, display), display.say, seams, display.service
        )
        rows = jsonl.read(claim.folder.evals)
        found = claim.record.origin
    run, env = loaded.config.run, loaded.config.data.env
    return {
        "model": f"{found['folder']}@{found['version']}" if found else loaded.config.model.path,
        "manifest": found["manifest"] if found else None,
        "seed": run.seed,
        "evaluations": [_row(row, str(row.get("env") or env)) for row in rows],
    }


def _row(row: Mapping[str, Any], env: str) -> dict[str, Any]:
    rate = SuccessRate.of(row)
    assert rate is not None
    kept = ("success", "n_tasks", "failed", "reward_mean", "turns_mean", "tokens", "ends", "elapsed_s")
    return {"env": env, "low": rate.low, "high": rate.high} | {key: row[key] for key in kept}


async def _evaluated(running: stack.LocalStack, display: ProgressDisplay) -> None:
    """Returns when version 0 is measured. Raises ServiceFailed if it cannot be."""
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
