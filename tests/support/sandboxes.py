"""Sandboxes that tests need and not every machine allows."""

from __future__ import annotations

from shared.errors import Forbidden
from volley_sandbox.sandbox.sandboxes import Sandboxes


async def why_no_programs() -> str:
    """Return why this machine cannot start agents' programs in sandboxes; empty if it can."""
    async with Sandboxes() as sandboxes:
        try:
            await sandboxes.probe_programs()
        except Forbidden as error:
            return error.detail
    return ""
