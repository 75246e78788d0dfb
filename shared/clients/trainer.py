"""Client of the trainer's records: the run's lineage, and lines for its folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shared.clients.base import MALFORMED, HttpClient
from shared.errors import MalformedAnswer
from shared.run.lineage import Lineage
from shared.types import WeightVersion

type Record = Literal["evals", "samples", "mixture"]


class TrainerClient(HttpClient):
    """Every method raises VolleyError: ServiceUnreachable, or what the service's problem body says."""

    async def lineage(self, version: WeightVersion) -> Lineage:
        """Of a run whose queue is at `version`. Raises MalformedAnswer."""
        answer = await self.get("/lineage", {"epoch": version.epoch, "step": version.step}, attempts=1)
        try:
            return tuple((int(epoch), int(began)) for epoch, began in answer["lineage"])
        except MALFORMED as error:
            raise MalformedAnswer(f"{self.base_url}/lineage: {error}") from error

    async def hand_over(self, record: Record, lines: Sequence[str]) -> None:
        """They are durable once this returns; lines that are there already are not added again."""
        await self.post(f"/records/{record}", {"lines": list(lines)})
