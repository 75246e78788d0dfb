"""`volley status`: readiness and weight version of each service, and which service waits for which."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.clients.base import HttpClient
from shared.engines import AS_REPORTED, DeclaredEngine
from shared.errors import ConfigError, ServiceUnreachable, VolleyError
from shared.run import wedge
from shared.run.folder import RunFolder
from shared.run.wedge import ServiceReport, Verdict
from shared.services import SERVICES, kind_of
from shared.web.access import Role, read_token, token_for
from volley.printing import format_json, join_lines, print_block
from volley.reporting.environments import format_mixture
from volley.run_arguments import add_trust
from volley.runs import addresses, identity
from volley.runs.addresses import Addresses
from volley.runs.record import read_record

_TIMEOUT_S = 5.0
_BETWEEN_S = 1.0  # between two readings of a server's token count
_LOOKS = 10  # a long prefill, a compilation or loading weights samples no tokens for a while
_KEYS = ("current", "staged", "state", "step", "version", "epoch", "phase")


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A service to ask.

    `kind` is None for a bare address: the service then names its own kind. `external`: not started by this run's
    supervisor.
    """

    name: str
    kind: str | None
    client: HttpClient
    external: bool = False


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="*", metavar="RUN_DIR|URL", help="a run's folder or addresses (default: newest run in runs/)"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="viewer token for services given by address")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificate for services given by address")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.targets, as_json=arguments.json, token_file=arguments.token_file, ca_file=arguments.ca_file)


def main(
    targets: Sequence[str], *, as_json: bool = False, token_file: Path | None = None, ca_file: Path | None = None
) -> int:
    """Print one line per service and the chain of waits.

    Args:
        token_file, ca_file: viewer token and CA for services given by address; a run's folder names its own.

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
        seen, verdict = asyncio.run(_of_run(folder))
    hint = _hint(folder) if verdict.state == "stopped" else []
    print_block(_json(seen, verdict) if as_json else _text(seen, verdict, hint))
    return 0 if all(s.error is None and s.not_ready is None for s in seen) and verdict.state != "wedged" else 1


async def observe(services: Sequence[ServiceStatus]) -> tuple[list[ServiceReport], Verdict]:
    """Ask all services. If nothing has advanced for a while, ask again, at most `_LOOKS` times, until every busy
    rollout server has sampled tokens.
    """
    seen = await ask_all(services)
    verdict = wedge.judge(seen)
    first = seen
    for look in range(1, _LOOKS + 1):
        if (verdict.quiet_s or 0.0) < wedge.FRESH_S or not any(_made(s) and not s.tokens_per_s for s in seen):
            break
        await asyncio.sleep(_BETWEEN_S)
        later = await ask_all(services)
        seen = [
            replace(now, tokens_per_s=(_made(now) - _made(then)) / (look * _BETWEEN_S))
            for then, now in zip(first, later, strict=True)
        ]
        verdict = wedge.judge(seen)
    return seen, verdict


def _at(urls: Sequence[str], token_file: Path | None, ca_file: Path | None) -> list[ServiceStatus]:
    token = read_token(token_file, "--token-file") if token_file else None
    return [
        ServiceStatus(url, None, HttpClient(url, token=token, timeout_s=_TIMEOUT_S, ca_file=ca_file)) for url in urls
    ]


async def _of_run(folder: RunFolder) -> tuple[list[ServiceReport], Verdict]:
    """Observe a run's services; if another run's services answer at its addresses, report the run as stopped."""
    found = addresses.read(folder)
    known = await identity.find_answering(folder, found)
    if not identity.is_elsewhere(known):
        return await observe(_services(found))
    errors = {name: identity.STRANGER if name in known else "nothing answers" for name in found.urls}
    seen = [
        ServiceReport(name, kind_of(name), url, errors[name], external=name in found.external)
        for name, url in found.urls.items()
    ]
    return seen, Verdict("stopped", (identity.elsewhere_message(folder),))


def _services(found: Addresses) -> list[ServiceStatus]:
    token = token_for(found.token_files, Role.VIEWER)
    return [
        ServiceStatus(
            name,
            kind_of(name),
            HttpClient(url, token=token, timeout_s=_TIMEOUT_S, ca_file=found.ca_file),
            external=name in found.external,
        )
        for name, url in found.urls.items()
    ]


async def ask_all(services: Sequence[ServiceStatus]) -> list[ServiceReport]:
    """Ask each service once for its state, and close its client."""
    return list(await asyncio.gather(*map(_ask, services)))


def unready(seen: Sequence[ServiceReport]) -> list[str]:
    """One sentence per service that is not ready."""
    return [f"{s.name} is {_state(s)}" for s in seen if s.error is not None or s.not_ready is not None]


async def _ask(service: ServiceStatus) -> ServiceReport:
    async with service.client as client:
        seen = ServiceReport(service.name, service.kind or "", client.base_url, external=service.external)
        try:
            kind = service.kind or str((await client.get("/health", attempts=1)).get("service"))
            seen = replace(seen, kind=kind, name=service.name if service.kind or _may_be_several(kind) else kind)
            await client.get("/ready", attempts=1)
        except ServiceUnreachable as error:
            return replace(seen, error=error.detail)
        except VolleyError as error:
            seen = replace(seen, not_ready=error.detail, waits_on=error.waits_on)
        return replace(seen, facts=await _details(client, seen.kind))


def _may_be_several(kind: str) -> bool:
    return kind in SERVICES and SERVICES[kind].replicated


async def _details(client: HttpClient, kind: str) -> dict[str, Any]:
    """Status of a service; the first if it serves several runs.

    Empty if the service does not answer; `untold` holds the reason if it refuses the request.
    """
    facts: dict[str, Any] = {}
    for path in SERVICES[kind].describes if kind in SERVICES else ():
        with suppress(ServiceUnreachable):
            try:
                answer: Any = await client.get(path, attempts=1)
            except VolleyError as error:
                answer = {"untold": error.detail}
            facts |= answer[0] if isinstance(answer, list) and answer else answer
    return facts


def _made(seen: ServiceReport) -> int:
    """Tokens that a rollout server has sampled since its start; 0 if it has no running requests."""
    engine = seen.facts.get("internal_state") or {}
    return int(engine.get("output_tokens", 0)) if engine.get("running") else 0


def _hint(folder: RunFolder | None) -> list[str]:
    """Next commands for a run whose services have ended."""
    record = None if folder is None else read_record(folder)
    if record is not None and record.finished:
        return ["it is finished: `volley report` shows its results, `volley up` with more steps continues it"]
    return ["`volley up` continues it; `volley report` shows its results"]


def _text(seen: Sequence[ServiceReport], verdict: Verdict, hint: Sequence[str] = ()) -> str:
    rows = [(f"{s.name} (external)" if s.external else s.name, s.url, _state(s), _details_of(s)) for s in seen]
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
    return join_lines(
        [*lines, f"{state}{quiet}{circle}", *chain, *_mixture(seen), *_memory(seen), *_bucket(seen), *hint]
    )


def _mixture(seen: Sequence[ServiceReport]) -> list[str]:
    """The run's environments if there are several, reasons for inactive ones, and warnings."""
    rows = next((one.facts["mixture"] for one in seen if one.facts.get("mixture")), [])
    shown = format_mixture(rows)
    reasons = [f"  {row['env']} is {row['state']}: {row['reason']}" for row in rows if row.get("reason")]
    warnings = [f"warning: {one}" for report in seen for one in report.facts.get("warnings") or ()]
    return [*([f"mixture: {shown}"] if shown else []), *reasons, *warnings]


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


def _state(seen: ServiceReport) -> str:
    if seen.error is not None:
        return f"not ready: {seen.error}"
    return "ready" if seen.not_ready is None else f"not ready: {seen.not_ready}"


def _details_of(seen: ServiceReport) -> str:
    if untold := seen.facts.get("untold"):
        return f"no status: {untold}"
    engine = DeclaredEngine.from_json(seen.facts.get("engine"))
    details = [f"{key} {seen.facts[key]}" for key in _KEYS if seen.facts.get(key) not in (None, "")]
    named = [f"engine {engine}"] if engine and engine.lacks else []
    return ", ".join([*details, *named, *([AS_REPORTED] if engine and engine.unproven else [])])


def _json(seen: Sequence[ServiceReport], verdict: Verdict) -> str:
    services = [dataclasses.asdict(s) | {"ready": _state(s) == "ready"} for s in seen]
    return format_json({**dataclasses.asdict(verdict), "services": services})
