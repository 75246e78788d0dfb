"""Supervised runs for commands and Python: configuration, progress, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shared import config as configuration
from shared.config import LoadedConfig
from shared.config_files import read_tree
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.run_config import section_of
from shared.schema import RunConfig
from volley.local.stack import LocalStack
from volley.local.supervisor import ServiceFailed
from volley.printing import print_result
from volley.reporting.progress import Activity, ProgressDisplay, RecordTails
from volley.runs.answers import fetch_status
from volley_supervised.conversations.files import check_file
from volley_supervised.lines import step_line
from volley_supervised.report import format_report, make
from volley_supervised.sections import SftSection

_POLL_S = 0.3


def configured(
    mode: Literal["sft", "dpo"],
    data: Sequence[Path],
    model: str | None,
    *,
    held_out: Sequence[Path],
    epochs: int | None,
    configs: Sequence[str],
    overrides: Sequence[str],
) -> LoadedConfig:
    """Return the configuration of a run; files of `configs` supply values that are not given. Raises ConfigError."""
    tree: dict[str, Any] = {"mode": mode, "sft": {}}
    if data:
        tree["sft"]["train"] = [str(path) for path in data]
    if held_out:
        tree["sft"]["eval"] = [str(path) for path in held_out]
    if epochs is not None:
        tree["sft"] |= {"epochs": epochs, "max_steps": 0}
    if model is not None:
        tree["model"] = {"path": model}
    elif not configs and not any(one.startswith("model.path=") for one in overrides):
        raise ConfigError("no model is named", f"run `volley {mode} DATA --model FOLDER`, or add --config FILE.yaml")
    if not any(one.startswith("run.name=") for one in overrides):
        tree["run"] = {"name": _name(mode, configs)}
    return configuration.rooted(configuration.load(configs, overrides, given=tree), Path.cwd())


def _name(mode: str, configs: Sequence[str]) -> str:
    """Name of the run: `NAME-sft`, because a configuration's own name belongs to its RL run."""
    named = [read_tree(Path(path)).get("run") or {} for path in configs]
    names = [str(one["name"]) for one in named if isinstance(one, dict) and one.get("name")]
    return f"{names[-1]}-{mode}" if names else mode


def check_files(config: RunConfig) -> None:
    """Raise ConfigError for files of conversations that are not there, or not of data."""
    sft = section_of(config, SftSection)
    for path in (*sft.train, *sft.eval):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder", "name files of conversations, or folders with them")
        if not path.is_dir():
            check_file(path)


async def follow(running: LocalStack, folder: RunFolder, display: ProgressDisplay, tails: RecordTails) -> None:
    """Show progress until the trainer is done. Raises ServiceFailed if the trainer stops training."""
    news = time.monotonic()
    async with running.client("trainer") as trainer:
        while True:
            status = await fetch_status(trainer, "/status")
            if display.detailed:
                display.activity(Activity(trainer=status))
            for kind, record in tails.new():
                display.record(kind, record)
                news = time.monotonic()
            if refused := status.get("refused"):
                raise ServiceFailed(f"run {folder.name} has stopped: {refused}", f"logs: {folder.logs}")
            if status.get("phase") == "done":
                return
            if time.monotonic() - news > display.quiet_s:
                display.quiet(_doing(status))
                news = time.monotonic()
            await asyncio.sleep(_POLL_S)


def _doing(status: Mapping[str, Any]) -> str:
    wait = status.get("waiting_for") or status.get("reason")
    return f"the trainer is {status.get('phase', 'away')}" + (f": {wait}" if wait else "")


def line(record: Mapping[str, Any]) -> str:
    """Format a line of sft.jsonl of a supervised run."""
    return step_line(record)


def report(folder: RunFolder) -> int:
    """Report a run. Returns the exit code."""
    summary = make(folder)
    print_result(summary, lambda: format_report(summary, folder))
    return 0
