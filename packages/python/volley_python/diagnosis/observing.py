"""State of a run's services, as the services themselves report it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from shared.clients.base import HttpClient
from shared.errors import ServiceUnreachable, VolleyError
from shared.process import host_memory
from shared.process.host_memory import HostMemory
from shared.run.folder import RunFolder
from shared.services import SERVICES, kind_of
from shared.web.access import Role, token_for
from volley.runs import addresses
from volley.runs.addresses import Addresses
from volley_python.diagnosis import identity, wedge
from volley_python.diagnosis.wedge import ServiceReport, Verdict

TIMEOUT_S = 5.0
_BETWEEN_S = 1.0  # between two readings of a server's token count
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOOKS = 10  # a long prefill, a compilation or loading weights samples no tokens for a while


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


async def observe(services: Sequence[ServiceStatus]) -> tuple[list[ServiceReport], Verdict]:
    """Ask all services. If nothing has advanced for a while, ask again, at most `_LOOKS` times, until every busy
    rollout server has sampled tokens.
    """
    seen = await ask_all(services)
    verdict = wedge.diagnose(seen)
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
        verdict = wedge.diagnose(seen)
    return seen, verdict


async def of_run(folder: RunFolder) -> tuple[list[ServiceReport], Verdict]:
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


async def waits(clients: Mapping[str, HttpClient], state: str) -> str:
    """State of a run, and the chain of waits from the waiting service to the one that blocks the others.

    A run that is only slow is not called wedged: some service must have halted, or services wait for each other.

    Args:
        clients: of the run's services, by name.
        state: of the run, as its orchestrator says.
    """
    seen = await ask_all([ServiceStatus(name, kind_of(name), client) for name, client in clients.items()])
    verdict = wedge.diagnose(seen)
    if state == "wedged" and not (verdict.cycle or any(node.halted for node in wedge.nodes(seen))):
        state = "waiting"
    return f"the run is {state}; {'; '.join(verdict.chain or _unready(seen)) or 'all services are ready'}"


def warnings_of(seen: Sequence[ServiceReport]) -> list[str]:
    """Return the services' own warnings, and one for each machine or container that is short of memory.

    This machine counts if it has services, because a service that waits for memory does not answer.
    """
    found = [str(one) for report in seen for one in report.facts.get("warnings") or ()]
    reports = [report.facts.get("host_memory") for report in seen]
    if any(urlsplit(report.url).hostname in _LOOPBACK for report in seen):
        reports.append(host_memory.report())
    hosts = {(one.host, one.on): one for raw in reports if (one := HostMemory.from_json(raw)) is not None}
    return list(dict.fromkeys([*found, *filter(None, (one.shortage() for one in hosts.values()))]))


def described(seen: Sequence[ServiceReport], verdict: Verdict) -> dict[str, Any]:
    """Describe an observation as JSON."""
    services = [asdict(one) | {"ready": state_of(one) == "ready"} for one in seen]
    return {**asdict(verdict), "warnings": warnings_of(seen), "services": services}


def _services(found: Addresses) -> list[ServiceStatus]:
    token = token_for(found.token_files, Role.VIEWER)
    return [
        ServiceStatus(
            name,
            kind_of(name),
            HttpClient(url, token=token, timeout_s=TIMEOUT_S, ca_file=found.ca_file),
            external=name in found.external,
        )
        for name, url in found.urls.items()
    ]


async def ask_all(services: Sequence[ServiceStatus]) -> list[ServiceReport]:
    """Ask each service once for its state, and close its client."""
    return list(await asyncio.gather(*map(_ask, services)))


def _unready(seen: Sequence[ServiceReport]) -> list[str]:
    """One sentence per service that is not ready."""
    return [f"{s.name} is {state_of(s)}" for s in seen if s.error is not None or s.not_ready is not None]


def state_of(seen: ServiceReport) -> str:
    if seen.error is not None:
        return f"not ready: {seen.error}"
    return "ready" if seen.not_ready is None else f"not ready: {seen.not_ready}"


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

    Empty if the service does not answer; `unreadable` holds the reason if it refuses the request.
    """
    facts: dict[str, Any] = {}
    for path in SERVICES[kind].describes if kind in SERVICES else ():
        with suppress(ServiceUnreachable):
            try:
                answer: Any = await client.get(path, attempts=1)
            except VolleyError as error:
                answer = {"unreadable": error.detail}
            facts |= answer[0] if isinstance(answer, list) and answer else answer
    return facts


def _made(seen: ServiceReport) -> int:
    """Tokens that a rollout server has sampled since its start; 0 if it has no running requests."""
    engine = seen.facts.get("internal_state") or {}
    return int(engine.get("output_tokens", 0)) if engine.get("running") else 0
