"""Routes of weights, of aborts and of the server's state.

Bodies are JSON or msgpack by Content-Type; answers have the same format.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from services.rollout.api import schemas
from services.rollout.api.generation import GenerationRunner
from services.rollout.api.validation import number
from services.rollout.engines.base import Engine, EngineInfo, EngineSpec
from services.rollout.engines.staged import CommitMode, CommitResult
from services.rollout.weights.holds import MAX_S
from services.rollout.weights.serving import StagedUpdate
from services.rollout.weights.updater import WeightUpdater
from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.process import host_memory
from shared.published.manifest import WeightOffer
from shared.published.serving import ChunkDigest, Uplink
from shared.web.access import Role
from shared.web.http import read_body, respond
from shared.web.openapi import declares, declares_bytes

router = APIRouter()
ROLES = {
    "GET /weights": Role.VIEWER,
    "GET /weights/chunks/{digest}": Role.SERVICE,
    "GET /weights/holdings/{digest}": Role.SERVICE,
    "POST /weights/stage": Role.ADMIN,
    "POST /weights/commit": Role.ADMIN,
    "POST /weights/hold": Role.SERVICE,
    "POST /update_weights": Role.ADMIN,
    "POST /abort_request": Role.SERVICE,
    "GET /server_info": Role.VIEWER,
    "GET /get_server_info": Role.VIEWER,
}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Objects that the routes use, in `app.state.rollout`. Without a tokenizer the text routes answer 422."""

    engine: Engine
    generation: GenerationRunner
    updates: WeightUpdater
    spec: EngineSpec
    tokenizer: ChatTokenizer | None
    uplink: Uplink
    model_name: str

    @property
    def info(self) -> EngineInfo:
        return self.engine.info


async def rollout_state(
    request: Request,
) -> RolloutState:  # async: FastAPI runs plain functions in a thread
    return request.app.state.rollout


Rollout = Annotated[RolloutState, Depends(rollout_state)]


@router.post("/weights/stage", tags=["weights"], openapi_extra=declares(body=schemas.STAGE, answer=schemas.STAGED))
async def stage(request: Request, state: Rollout) -> Response:
    """Load a published version ({version, manifest, sources}), or the checkpoint at the path `manifest`, beside the
    serving weights, while decoding goes on.
    """
    return respond(request, _staged(await state.updates.stage(_weights(await read_body(request)))))


@router.post("/weights/commit", tags=["weights"], openapi_extra=declares(body=schemas.COMMIT, answer=schemas.COMMITTED))
async def commit(request: Request, state: Rollout) -> Response:
    """Make the staged `version` serve, between two steps. Refused if `base_version` is given but is not serving."""
    body = await read_body(request)
    base = text_field(body, "base_version") if body.get("base_version") is not None else None
    return respond(
        request, _committed(await state.updates.commit(text_field(body, "version"), base, commit_mode(body)))
    )


@router.post("/weights/hold", tags=["weights"], openapi_extra=declares(body=schemas.HOLD, answer=schemas.HELD))
async def hold(request: Request, state: Rollout) -> Response:
    """Keep `version` serving for `seconds` (at most 60; 0 releases it): newer versions are loaded, and committed
    afterwards. Each `holder` has a lease of its own. Refused if `version` neither serves nor is being loaded.
    """
    body = await read_body(request)
    version, seconds = text_field(body, "version"), number("seconds", body.get("seconds"), MAX_S, 0.0, 3600.0)
    state.updates.hold(text_field(body, "holder"), version, seconds)
    return respond(request, {"version": version, "seconds": min(seconds, MAX_S)})


@router.get("/weights", tags=["weights"], openapi_extra=declares(answer=schemas.WEIGHTS))
async def weights(request: Request, state: Rollout) -> Response:
    """Return the serving, the staged and the arriving version, and the one that was refused for good."""
    updates = state.updates
    staged = updates.staged.version if updates.staged else None
    found = {"current": updates.current, "staged": staged, "digest": updates.digest, "arriving": updates.arriving}
    refused = updates.refused
    return respond(
        request, found | {"refused": {"version": refused.version, "reason": refused.reason} if refused else None}
    )


@router.get("/weights/chunks/{digest}", tags=["weights"], openapi_extra=declares_bytes(200, 206))
async def chunk(request: Request, digest: ChunkDigest, state: Rollout) -> Response:
    """Return a chunk of the serving weights or of those being pulled, or a manifest, by its blake3 digest.
    `Range: bytes=N-` gives the bytes from N on.
    """
    return await state.uplink.answer(request, digest)


@router.get("/weights/holdings/{digest}", tags=["weights"], openapi_extra=declares_bytes(200))
async def holding(digest: ChunkDigest, state: Rollout) -> Response:
    """Return which chunks of the version with that manifest are here, and which are being pulled: two rows with a bit
    for each chunk, in the manifest's order, highest bit of the first byte first. The second row begins a new byte.
    """
    return Response(state.updates.holding(digest).to_bytes(), media_type="application/octet-stream")


@router.post("/update_weights", tags=["weights"], openapi_extra=declares(body=schemas.UPDATE, answer=schemas.UPDATED))
async def update_weights(request: Request, state: Rollout) -> Response:
    """Stage and commit a version."""
    body = await read_body(request)
    return respond(request, await update(state, _weights(body), commit_mode(body)))


@router.post("/abort_request", tags=["control"], openapi_extra=declares(body=schemas.ABORT, answer=schemas.ABORTED))
async def abort_request(request: Request, state: Rollout) -> Response:
    """End the request `rid`, or all with `abort_all`; each answers with the tokens it has sampled."""
    body = await read_body(request)
    everything = body.get("abort_all")
    if everything is not None and not isinstance(everything, bool):
        raise InputError(f"abort_all must be true or false, not {reprlib.repr(everything)}")
    return respond(request, {"aborted": await state.engine.abort(None if everything else text_field(body, "rid"))})


@router.get("/server_info", tags=["info"], openapi_extra=declares(answer=schemas.SERVER))
@router.get("/get_server_info", tags=["info"], openapi_extra=declares(answer=schemas.SERVER))
async def get_server_info(request: Request, state: Rollout) -> Response:
    """Return the engine's kind and capabilities, its settings and its present load."""
    status, info = await state.engine.status(), state.info
    load = dataclasses.asdict(status)
    return respond(
        request,
        {
            **dataclasses.asdict(state.spec),
            **dataclasses.asdict(info),
            "engine": state.updates.declared.to_json(),
            "internal_state": load,
            "internal_states": [load],
            "host_memory": host_memory.report(),
            "served_model_name": state.model_name,
            "version": f"volley-{state.updates.declared.kind}",
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "disaggregation_mode": "null",
            "enable_memory_saver": False,
            "enable_return_routed_experts": "routing" in state.updates.declared.capabilities,
            "max_total_num_tokens": info.max_total_tokens,
            "max_req_input_len": info.context_length - 1,
        },
    )


async def update(
    state: RolloutState, wanted: str | WeightOffer, mode: CommitMode | None, name: str | None = None
) -> dict[str, Any]:
    """Stage and commit weights, under another `name` if one is given; return the answer. Raises VolleyError."""
    staged, committed = await state.updates.update(wanted, mode, name)
    done = _committed(committed) | {"engine": state.updates.declared.to_json()}
    return {**done, "timings": {**staged.timings, **done["timings"]}}


def _staged(staged: StagedUpdate) -> dict[str, Any]:
    return {"staged": staged.version, "digest": staged.digest, "timings": dict(staged.timings)}


def _committed(result: CommitResult) -> dict[str, Any]:
    counts = {"continued": result.continued, "aborted": result.aborted}
    return {"version": result.version, "previous": result.previous, **counts, "timings": {"pause_s": result.pause_s}}


def text_field(body: dict[str, Any], name: str) -> str:
    """Read a text that must be there. Raises InputError."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a non-empty string, not {reprlib.repr(value)}")
    return value


def _weights(body: dict[str, Any]) -> str | WeightOffer:
    return WeightOffer.from_json(body) if "sources" in body else text_field(body, "manifest")


def commit_mode(body: dict[str, Any]) -> CommitMode | None:
    """Read the field `mode`. Raises InputError."""
    mode = body.get("mode")
    if mode is None:
        return None
    for known in get_args(CommitMode):
        if isinstance(mode, str) and mode == known:
            return known
    raise InputError(f"mode {reprlib.repr(mode)} is unknown", f"one of {', '.join(get_args(CommitMode))}")
