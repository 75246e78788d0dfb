"""Client of who has published weights: a trainer, or a rollout server that passes on what it has."""

from __future__ import annotations

from shared.clients.base import HttpClient, Take
from shared.errors import InputError, MalformedAnswer
from shared.published.holding import Holding, size_of
from shared.published.manifest import WeightOffer


class WeightSource(HttpClient):
    """Every method raises VolleyError: ServiceUnreachable, or what the service's problem body says."""

    async def newest(self) -> WeightOffer:
        """Raises WeightsUnpublished while there is no version, and MalformedAnswer."""
        try:
            return WeightOffer.from_json(await self.get("/weights/newest", attempts=1))
        except InputError as error:
            if type(error) is InputError:
                raise MalformedAnswer(f"{self.base_url}/weights/newest: {error.detail}") from error
            raise

    async def chunk(self, digest: str, take: Take, start: int = 0) -> None:
        """Its bytes from `start` on. Raises NotFound where it is not there, and Unavailable while others are served."""
        await self.download(f"/weights/chunks/{digest}", take, start=start)

    async def holding(self, manifest: str, n: int) -> Holding:
        """What it has of the n chunks of that version, in the order of its manifest. Raises NotFound where it knows
        nothing of it, and DecodeError.
        """
        told = bytearray()

        def take(block: bytes) -> None:
            if len(told) + len(block) > size_of(n):
                raise MalformedAnswer(f"{self.base_url} tells of more than {n} chunks")
            told.extend(block)

        await self.download(f"/weights/holdings/{manifest}", take)
        return Holding.from_bytes(told, n)
