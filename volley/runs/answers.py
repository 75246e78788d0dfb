"""Status requests to services that may be down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.clients.base import HttpClient
from shared.errors import VolleyError


async def fetch_status(client: HttpClient, path: str) -> Mapping[str, Any]:
    """Answer of the service; `{"reason": …}` if it does not answer (it may be restarting)."""
    try:
        return await client.get(path, attempts=1)
    except VolleyError as error:
        return {"reason": str(error)}
