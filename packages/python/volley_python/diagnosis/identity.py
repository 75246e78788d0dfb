"""Check that the services at a run's addresses belong to it.

After the run has ended, another run may use its ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shared.clients.base import HttpClient
from shared.errors import ConfigError, ServiceUnreachable, Unauthorized, VolleyError
from shared.run.folder import RunFolder
from shared.services import SERVICES, kind_of
from shared.web.access import Role, token_for
from volley.runs.addresses import Addresses
from volley.runs.run_file import name_of

STRANGER = "another run's service answers there"
_TIMEOUT_S = 3.0


async def find_answering(folder: RunFolder, found: Addresses) -> dict[str, bool]:
    """Find the services that answer, by name, and whether each belongs to this run.

    If a service belongs to another run and neither trainer nor orchestrator to this one, none does. A service that
    refuses the run's token belongs to another run, unless it is external and serves several runs. A service that
    cannot be identified counts as the run's.
    """
    known: dict[str, bool] = {}
    for name, url in found.urls.items():
        with suppress(ServiceUnreachable):
            known[name] = await _ours(folder, found, name, url)
    core = [ours for name, ours in known.items() if (info := SERVICES.get(kind_of(name))) and info.run_key]
    if not all(known.values()) and not any(core):
        return dict.fromkeys(known, False)
    return known


def is_elsewhere(known: Mapping[str, bool]) -> bool:
    """Return True if every service that answers belongs to another run."""
    return bool(known) and not any(known.values())


def elsewhere_message(folder: RunFolder) -> str:
    return f"run {folder.name} is not running; other services answer at its addresses"


async def _ours(folder: RunFolder, found: Addresses, name: str, url: str) -> bool:
    """Return True if a service belongs to the run. Raises ServiceUnreachable if nothing answers."""
    info, token, readable = SERVICES.get(kind_of(name)), None, False
    with suppress(ConfigError):
        token, readable = token_for(found.token_files, Role.VIEWER), True
    async with HttpClient(url, token=token, timeout_s=_TIMEOUT_S, ca_file=found.ca_file) as client:
        if info is None or not await _is_service(client, info.name):
            return False
        if name in found.external and info.run_key is None:
            return True
        try:
            answer = await client.get(info.guarded, attempts=1)
        except ServiceUnreachable:
            raise
        except Unauthorized:
            return not readable
        except VolleyError:
            return True
    return info.run_key is None or _serves(answer, info.run_key, name_of(folder))


async def _is_service(client: HttpClient, kind: str) -> bool:
    """Raises ServiceUnreachable."""
    try:
        health = await client.get("/health", attempts=1)
    except ServiceUnreachable:
        raise
    except VolleyError:
        return False
    return isinstance(health, dict) and health.get("service") == kind


def _serves(answer: Any, key: str, run: str) -> bool:
    rows = answer if isinstance(answer, list) else [answer]
    names = {row[key] for row in rows if isinstance(row, dict) and isinstance(row.get(key), str)}
    return not names or run in names
