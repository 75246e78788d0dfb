"""Client of the trainer's records: lines of the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from shared.clients.base import MALFORMED, HttpClient
from shared.errors import MalformedAnswer
from shared.run.folder import Record


class TrainerClient(HttpClient):
    """Methods raise VolleyError: ServiceUnreachable, or what the service's problem body says."""

    async def hand_over(self, record: Record, lines: Sequence[str]) -> None:
        """They are durable once this returns; lines that are there already are not added again."""
        await self.post(f"/records/{record}", {"lines": list(lines)})

    async def record(self, record: Record, offset: int) -> tuple[list[str], int]:
        """Whole lines from a byte of a record on, and where to go on: at `offset` if that is its end."""
        said = await self.get(f"/records/{record}", {"offset": offset})
        try:
            lines, after = [str(line) for line in said["lines"]], int(said["next"])
        except MALFORMED as error:
            raise MalformedAnswer(f"{self.base_url} does not answer with lines of {record}") from error
        if after < offset or "\n" in "".join(lines):
            raise MalformedAnswer(f"{self.base_url} answers with lines of {record} that are none")
        return lines, after
