"""Client of the trainer's records: lines of files in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shared.clients.base import MALFORMED, HttpClient
from shared.errors import MalformedAnswer
from shared.run.folder import Record


class TrainerClient(HttpClient):
    """Methods raise VolleyError: ServiceUnreachable, or the error in the service's problem body."""

    async def hand_over(self, record: Record, lines: Sequence[str]) -> None:
        """Append lines to a record; they are durable on return, and existing lines are not added again."""
        await self.post(f"/records/{record}", {"lines": list(lines)})

    async def record(self, record: Record | Literal["ledger"], offset: int) -> tuple[list[str], int]:
        """Return whole lines of a record from a byte offset on, and the next offset.

        The next offset is `offset` at the end of the record.
        """
        answer = await self.get(f"/records/{record}", {"offset": offset})
        try:
            lines, after = [str(line) for line in answer["lines"]], int(answer["next"])
        except MALFORMED as error:
            raise MalformedAnswer(f"{self.base_url} did not answer with lines of {record}") from error
        if after < offset or "\n" in "".join(lines):
            raise MalformedAnswer(f"{self.base_url} answered with invalid lines of {record}")
        return lines, after
