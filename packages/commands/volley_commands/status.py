"""`volley status`: readiness and weight version of each service, and which service waits for which."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

from shared.clients.base import HttpClient
from shared.engines import AS_REPORTED, DeclaredEngine
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.visible import quoted
from shared.web.access import read_token
from volley.printing import clear_screen, join_lines, one_line, print_result
from volley.reporting.lines import format_mixture
from volley.run_arguments import add_trust
from volley.runs import addresses
from volley.runs.run_file import is_held, read_record
from volley_python.diagnosis import wedge
from volley_python.diagnosis.identity import STRANGER
from volley_python.diagnosis.observing import (
    TIMEOUT_S,
    ServiceStatus,
    described,
    observe,
    of_run,
    state_of,
    warnings_of,
)
from volley_python.diagnosis.wedge import ServiceReport, Verdict

_KEYS = ("current", "staged", "state", "step", "version", "epoch", "phase")
_OF_FILE = re.compile(r".+-[0-9a-f]{8}@1")  # see shared.run.sources


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="*", metavar="RUN_DIR|URL", help="a run's folder or addresses (default: newest run in runs/)"
    )
    add_trust(parser)
    parser.add_argument(
        "--watch", type=float, nargs="?", const=2.0, metavar="S", help="repeat every S seconds (default 2) until Ctrl-C"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="viewer token for services given by address")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificate for services given by address")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""

    def once() -> int:
        return main(
            arguments.targets,
            token_file=arguments.token_file,
            ca_file=arguments.ca_file,
            repeated=arguments.watch is not None,
        )

    if arguments.watch is None:
        return once()
    if not 0 < arguments.watch < 86_400:
        raise ConfigError(f"--watch {arguments.watch:g} is not a number of seconds", "give one above 0, such as 2")
    while True:
        clear_screen()
        once()
        time.sleep(arguments.watch)


def main(
    targets: Sequence[str],
    *,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    repeated: bool = False,
) -> int:
    """Print one line per service and the chain of waits.

    Args:
        token_file, ca_file: viewer token and CA for services given by address; a run's folder names its own.
        repeated: this is one of several looks; each is a line of JSON, if that is wanted.

    Returns: exit code 0 if all services are ready and the run is not wedged, else 1.

    Raises:
        ConfigError: the target is neither a run's folder nor an address.
    """
    folder = None
    if targets and all("://" in target for target in targets):
        seen, verdict = asyncio.run(observe(_at(targets, token_file, ca_file)))
    elif len(targets) > 1:
        raise ConfigError("give one run's folder, or addresses like http://127.0.0.1:8102")
    else:
        folder = RunFolder(Path(targets[0]).absolute()) if targets else addresses.newest_run()
        seen, verdict = asyncio.run(of_run(folder))
    ended = verdict.state == "stopped" and folder is not None and not is_held(folder)
    text = join_lines([*_ended(folder), *_elsewhere(seen, verdict)]) if ended and folder else _text(seen, verdict)
    print_result(described(seen, verdict), text, one_line=repeated)
    return 0 if all(s.error is None and s.not_ready is None for s in seen) and verdict.state != "wedged" else 1


def _at(urls: Sequence[str], token_file: Path | None, ca_file: Path | None) -> list[ServiceStatus]:
    token = read_token(token_file, "--token-file") if token_file else None
    return [
        ServiceStatus(url, None, HttpClient(url, token=token, timeout_s=TIMEOUT_S, ca_file=ca_file)) for url in urls
    ]


def _ended(folder: RunFolder) -> list[str]:
    """State of a run whose services have ended, and the next commands."""
    record, run = read_record(folder), f"run {folder.name}"
    report, up = f"`volley report {quoted(folder.path)}`", f"`volley up {quoted(folder.path)}`"
    if record is not None and record.finished:
        return [f"{run} is finished", f"{report} shows its results, {up} with more steps continues it"]
    if record is not None and record.failed:
        env = str(record.config.get("data.env"))
        has_step = folder.metrics.exists() and folder.metrics.stat().st_size
        other = "needs another run.name=…" if has_step else "is used if you repeat the command that started the run"
        copied = f" with its own copy of {env}; a corrected file {other}"
        return [
            f"{run} has failed: {one_line(record.failed)}",
            f"after you have fixed it, {up} continues it{copied if _OF_FILE.fullmatch(env) else ''}",
        ]
    return [f"{run} is stopped", f"{up} continues it; {report} shows its results"]


def _elsewhere(seen: Sequence[ServiceReport], verdict: Verdict) -> list[str]:
    """Sentence on another run's services at this run's addresses, if there are any."""
    return list(verdict.chain) if any(one.error == STRANGER for one in seen) else []


def _text(seen: Sequence[ServiceReport], verdict: Verdict) -> str:
    rows = [(f"{s.name} (external)" if s.external else s.name, s.url, state_of(s), _details_of(s)) for s in seen]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    quiet = (
        f", nothing has advanced for {verdict.quiet_s:.0f} s"
        if verdict.quiet_s and verdict.quiet_s >= wedge.FRESH_S
        else ""
    )
    circle = ", they wait in a circle" if verdict.cycle else ""
    state = "the state of the run is unknown" if verdict.state == "unknown" else f"the run is {verdict.state}"
    chain = [f"  ← {sentence}" for sentence in verdict.chain]
    warnings = [f"warning: {one}" for one in warnings_of(seen)]
    return join_lines(
        [*lines, f"{state}{quiet}{circle}", *chain, *warnings, *_mixture(seen), *_memory(seen), *_bucket(seen)]
    )


def _mixture(seen: Sequence[ServiceReport]) -> list[str]:
    """The run's environments if there are several, and reasons for inactive ones."""
    rows = next((one.facts["mixture"] for one in seen if one.facts.get("mixture")), [])
    shown = format_mixture(rows)
    reasons = [f"  {row['env']} is {row['state']}: {row['reason']}" for row in rows if row.get("reason")]
    return [*([f"mixture: {shown}"] if shown else []), *reasons]


def _memory(seen: Sequence[ServiceReport]) -> list[str]:
    """The trainer's plan and its estimate of memory on each device."""
    parts = next((one.facts["memory"] for one in seen if one.facts.get("memory")), {})
    shown = ", ".join(f"{name} {mib:,.0f}" for name, mib in parts.items())
    plans = [f"plan: {one.facts['plan']}" for one in seen if one.facts.get("plan")]
    plans += [f"the lineage branched: {one.facts['branched']}" for one in seen if one.facts.get("branched")]
    return [*plans, *([f"memory of the trainer in MiB: {shown}"] if shown else [])]


def _bucket(seen: Sequence[ServiceReport]) -> list[str]:
    """Newest step in the run's bucket, compared with the run's folder."""
    shown = [one.facts for one in seen if one.facts.get("bucket")]
    return [
        "the run's bucket has nothing yet"
        if facts["bucket_step"] is None
        else f"the run's bucket has step {facts['bucket_step']} of {facts['durable_step']}"
        for facts in shown
    ]


def _details_of(seen: ServiceReport) -> str:
    if unreadable := seen.facts.get("unreadable"):
        return f"no status: {unreadable}"
    engine = DeclaredEngine.from_json(seen.facts.get("engine"))
    details = [f"{key} {seen.facts[key]}" for key in _KEYS if seen.facts.get(key) not in (None, "")]
    named = [f"engine {engine}"] if engine and engine.lacks else []
    return ", ".join([*details, *named, *([AS_REPORTED] if engine and engine.unproven else [])])
