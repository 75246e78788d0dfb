"""`volley follow`: watch a run whose services run elsewhere, and report at its end.

The services may run in containers or on several hosts.
It starts and stops no service. Stopping it does not stop the run; the same command follows the run again.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.run.pinned import MAX_STEPS
from shared.web.access import Role, token_for
from volley.commands import train
from volley.local import stack
from volley.local.sidecars import sidecars
from volley.local.signals import Stopped, stopping_on_signal
from volley.printing import print_lines
from volley.reporting.display import shown
from volley.reporting.progress import RecordTails
from volley.reports import reports
from volley.runs.addresses import followed
from volley.runs.elapsed import counting
from volley.runs.record import claimed
from volley.runs.run_file import read_record


def add(parser: argparse.ArgumentParser) -> None:
    config.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.config, arguments.overrides)


def main(paths: Sequence[str], overrides: Sequence[str]) -> int:
    """Follow the run. A finished run is only reported, unless it is given more steps. Raises VolleyError."""
    loaded = config.load(paths, overrides)
    if loaded.config.is_supervised:
        raise ConfigError(f"mode={loaded.config.mode}: `volley follow` watches only RL runs", "use `volley status URL`")
    record = read_record(RunFolder(loaded.config.run.folder))
    if record is not None and record.finished and loaded.config.trainer.max_steps <= record.config.get(MAX_STEPS, 0):
        return reports().main(loaded.config.run.folder)
    with claimed(loaded) as (folder, record, _):
        with counting(folder, record) as worked:
            try:
                asyncio.run(_watch(loaded, folder))
            except Stopped as stopped:
                with suppress(OSError):  # standard output may be gone
                    print_lines(f"stopped by {stopped}; run {folder.name} continues; the same command follows it again")
                return stopped.exit_code
        return train.finish(folder, worked.record())


async def _watch(loaded: LoadedConfig, folder: RunFolder) -> None:
    """Raises Stopped after a signal, or VolleyError."""
    services = loaded.config.services
    urls = followed(services)
    print_lines(f"run {folder.name} in {folder.path}: following {urls['orchestrator']}")
    running = stack.LocalStack(urls, token_for(services.token_files, Role.VIEWER), services.tls.ca_file, [])
    async with stopping_on_signal():
        with sidecars(folder, loaded.config), shown(loaded.config.trainer.max_steps) as display:
            await train.follow(running, folder, display, RecordTails(folder))
