"""`volley track`: report a run to experiment trackers, while it is trained or afterwards."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import get_args

from shared.errors import ConfigError, VolleyError
from shared.run.folder import RunFolder
from shared.run_config import value_of
from volley.printing import print_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_run_dir
from volley.runs.record import stored
from volley.runs.run_file import read_record
from volley_dashboard.keys import TRACKERS, TrackerName
from volley_dashboard.tracking.upload import upload

NAMES: tuple[str, ...] = get_args(TrackerName.__value__)


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument(
        "--to",
        action="append",
        choices=NAMES,
        help="tracker to report to; repeatable; default: run.trackers of the run's configuration",
    )
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends or Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir, arguments.to or (), follow=arguments.follow)


def main(run_dir: Path, trackers: Sequence[str], *, follow: bool = False) -> int:
    """Send the run's lines that a tracker has not got yet. Returns 1 if a tracker failed. Raises VolleyError."""
    folder = RunFolder(run_dir.absolute())
    wanted = tuple(dict.fromkeys(trackers or value_of(stored(run_dir)[0].config, TRACKERS)))
    if not wanted:
        raise ConfigError(f"{run_dir} names no tracker", f"name one with --to {'|'.join(NAMES)}, or set run.trackers")
    if read_record(folder) is None:
        raise ConfigError(f"{run_dir} is not the folder of a run", "name one, such as runs/quickstart")
    ended, failed = threading.Event(), dict[str, str]()

    def report(tracker: str) -> None:
        try:
            upload(folder, tracker, ended, print_lines, follow=follow)
            print_lines(f"{tracker}: run {folder.name} is reported")
        except (VolleyError, OSError) as error:
            failed[tracker] = str(error)
            print_lines(f"{tracker}: {error}")

    with nullcontext() if follow else working(f"reporting to {', '.join(wanted)}"), ExitStack() as threads:
        for tracker in wanted:
            thread = threading.Thread(target=report, args=(tracker,), name=tracker)
            thread.start()
            threads.callback(thread.join)
        if follow:
            threads.callback(ended.set)
            _wait_for_end_of_input()
    print_result({"reported": [name for name in wanted if name not in failed], "failed": failed})
    return 1 if failed else 0


def _wait_for_end_of_input() -> None:
    with suppress(KeyboardInterrupt):
        while sys.stdin.buffer.read(4096):
            pass
