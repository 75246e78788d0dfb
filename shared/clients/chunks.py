"""Client of a source of published weights: a trainer, or a rollout server that shares its chunks."""

from __future__ import annotations

from shared.clients.base import HttpClient
from shared.clients.wires import Take
from shared.errors import InputError, MalformedAnswer
from shared.published.holding import Holding, size_of
from shared.published.manifest import WeightOffer


class WeightSource(HttpClient):
    """Every method raises VolleyError: ServiceUnreachable, or the error in the service's problem body."""

    async def newest(self) -> WeightOffer:
        """Return the newest version. Raises WeightsUnpublished if there is none yet, and MalformedAnswer."""
        try:
            return WeightOffer.from_json(await self.get("/weights/newest", attempts=1))
        except InputError as error:
            if type(error) is InputError:
                raise MalformedAnswer(f"{self.base_url}/weights/newest: {error.detail}") from error
            raise

    async def chunk(self, digest: str, take: Take, start: int = 0) -> None:
        """Receive a chunk's bytes from `start` on.

        Raises NotFound if it is missing, and Unavailable while others are served.
        """
        await self.download(f"/weights/chunks/{digest}", take, start=start)

    async def holding(self, manifest: str, n: int) -> Holding:
        """Return which of the n chunks of a version the source has, in the order of the manifest.

        Raises NotFound if it does not know the version, and DecodeError.
        """
        received = bytearray()

        def take(block: bytes) -> None:
            if len(received) + len(block) > size_of(n):
                raise MalformedAnswer(f"{self.base_url} lists more than {n} chunks")
            received.extend(block)

        await self.download(f"/weights/holdings/{manifest}", take)
        return Holding.from_bytes(received, n)
