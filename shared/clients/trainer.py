"""Client of the trainer's records: lines for the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from shared.clients.base import HttpClient
from shared.run.folder import Record


class TrainerClient(HttpClient):
    """Methods raise VolleyError: ServiceUnreachable, or what the service's problem body says."""

    async def hand_over(self, record: Record, lines: Sequence[str]) -> None:
        """They are durable once this returns; lines that are there already are not added again."""
        await self.post(f"/records/{record}", {"lines": list(lines)})
