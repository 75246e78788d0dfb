"""Wait for the decision on a submitted environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from shared.clients.env import EnvClient
from shared.errors import InputError, Unavailable
from shared.visible import quoted

_POLL_S = 0.3


async def decided(
    client: EnvClient, name: str, state: str, wait_s: float, say: Callable[[str], None] = lambda line: None
) -> Mapping[str, Any]:
    """Wait until the version NAME@VERSION is validated, and return its row. Raises Unavailable after `wait_s` seconds.

    Args:
        state: its state when it was submitted; `say` gets a sentence for each other one.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        row = (await client.versions(name))[0]
        if row["state"] != state:
            state = row["state"]
            say(f"{name} is {state}: {row['why']}" if row["why"] else f"{name} is {state}")
        if state not in ("submitted", "validating"):
            return row
        await asyncio.sleep(_POLL_S)
    raise Unavailable(
        f"{name} is still {state} after {wait_s:g} s", f"`volley env show {quoted(name)}` shows its state"
    )


def check_accepted(row: Mapping[str, Any]) -> None:
    """Raise InputError that names the failed checks if the version was rejected."""
    if row["state"] != "rejected":
        return
    failed = [f"{one['name']}: {one['detail']}" for one in (row.get("report") or {}).get("checks", ()) if not one["ok"]]
    raise InputError(f"{row['name']} was rejected: {'; '.join(failed) or row['why']}", "mend it and submit it again")
