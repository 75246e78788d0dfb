"""HTTP routes of published weights: the newest version and its chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from services.trainer.publishing.publications import Publications
from shared.errors import WeightsUnpublished
from shared.published.manifest import WeightOffer
from shared.published.serving import ChunkDigest, Uplink
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import declares, declares_bytes

router = APIRouter(tags=["weights"])
ROLES = {"GET /weights/newest": Role.SERVICE, "GET /weights/chunks/{digest}": Role.SERVICE}
_NEWEST = {
    "type": "object",
    "properties": {
        "version": {"type": "string"},
        "manifest": {"type": "object"},
        "digest": {"type": "string"},
        "sources": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["version", "manifest", "digest", "sources"],
}


@dataclass(frozen=True, slots=True)
class PublishingState:
    """State of the routes, in `app.state.publishing`; `sources` lists addresses that may have chunks."""

    publications: Publications
    uplink: Uplink
    sources: Callable[[], Awaitable[Sequence[str]]]


async def _state(request: Request) -> PublishingState:
    return request.app.state.publishing


Here = Annotated[PublishingState, Depends(_state)]


@router.get("/weights/newest", openapi_extra=declares(answer=_NEWEST))
async def newest(request: Request, state: Here) -> Response:
    """The newest version: blake3 and size of its manifest, and addresses that may have its chunks."""
    found = state.publications.newest
    if found is None:
        raise WeightsUnpublished("this trainer has published no weights yet")
    offer = WeightOffer(str(found.version), found.manifest, tuple(await state.sources()))
    return respond(request, {**offer.to_json(), "digest": found.digest})


@router.get("/weights/chunks/{digest}", openapi_extra=declares_bytes(200, 206))
async def chunk(request: Request, digest: ChunkDigest, state: Here) -> Response:
    """A chunk or a manifest of one of the newest versions, by its blake3. `Range: bytes=N-` resumes a download."""
    return await state.uplink.answer(request, digest)
