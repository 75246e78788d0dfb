"""Routes that read and manage sessions, models, samplers and checkpoints."""

from __future__ import annotations

import asyncio
import datetime
import hmac
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, Response

from shared.errors import Expired, Forbidden, InputError
from shared.web.access import Role
from shared.web.http import read_body, respond
from shared.web.openapi import declares, declares_bytes
from volley_tinker.server import schemas, specs
from volley_tinker.server.entries import Checkpoint
from volley_tinker.server.service import TinkerService

router = APIRouter(prefix="/api/v1", tags=["records"])
_KINDS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
_URL_S = 3600
_CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"
ROLES = {
    **{
        f"GET /api/v1/{path}": Role.SERVICE
        for path in (
            "sessions",
            "sessions/{session}",
            "samplers/{sampler}",
            "training_runs",
            "training_runs/{model}",
            "training_runs/{model}/checkpoints",
            "checkpoints",
            "whoami",
        )
    },
    "POST /api/v1/weights_info": Role.SERVICE,
    f"GET /api/v1/{_CHECKPOINT}/external_weights_urls": Role.SERVICE,
    "GET /api/v1/external_weights/{signature}/{expires}/{folder}/{file}": Role.ANYONE,
    f"DELETE /api/v1/{_CHECKPOINT}": Role.SERVICE,
    f"POST /api/v1/{_CHECKPOINT}/publish": Role.SERVICE,
    f"DELETE /api/v1/{_CHECKPOINT}/publish": Role.SERVICE,
    f"PUT /api/v1/{_CHECKPOINT}/ttl": Role.SERVICE,
}
_KEY = secrets.token_bytes(32)
"""Signs addresses; those of an earlier process are not accepted."""
_ANSWER = declares(answer=schemas.OBJECT)


async def _tinker(request: Request) -> TinkerService:
    return request.app.state.tinker


Here = Annotated[TinkerService, Depends(_tinker)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


@router.get("/whoami", openapi_extra=_ANSWER)
async def whoami(request: Request) -> Response:
    return respond(request, {"user_urn": "urn:volley:service", "org_urn": "urn:volley:server", "email": None})


@router.get("/sessions", openapi_extra=_ANSWER)
async def sessions(request: Request, tinker: Here, limit: Limit = 20, offset: Offset = 0) -> Response:
    return respond(request, {"sessions": await tinker.db(tinker.store.sessions, limit, offset)})


@router.get("/sessions/{session}", openapi_extra=_ANSWER)
async def session(request: Request, session: str, tinker: Here) -> Response:
    described, _ = await tinker.db(tinker.store.session, session)
    models = await tinker.db(tinker.store.models, session)
    samplers = await tinker.db(tinker.store.samplers, session)
    return respond(request, {"training_run_ids": models, "sampler_ids": samplers, **described})


@router.get("/samplers/{sampler}", openapi_extra=_ANSWER)
async def sampler(request: Request, sampler: str, tinker: Here) -> Response:
    path = await tinker.db(tinker.store.sampler, sampler)
    return respond(request, {"sampler_id": sampler, "base_model": tinker.name, "model_path": path})


@router.get("/training_runs", openapi_extra=_ANSWER)
async def training_runs(request: Request, tinker: Here, limit: Limit = 20, offset: Offset = 0) -> Response:
    models = await tinker.db(tinker.store.models)
    runs = [await _run(tinker, model) for model in models[offset : offset + limit]]
    return respond(request, {"training_runs": runs, "cursor": _cursor(offset, limit, len(models))})


@router.get("/training_runs/{model}", openapi_extra=_ANSWER)
async def training_run(request: Request, model: str, tinker: Here) -> Response:
    return respond(request, await _run(tinker, model))


@router.get("/training_runs/{model}/checkpoints", openapi_extra=_ANSWER)
async def checkpoints(request: Request, model: str, tinker: Here) -> Response:
    await tinker.db(tinker.store.model, model)
    found = await tinker.db(tinker.store.checkpoints, model)
    return respond(request, {"checkpoints": [_described(one) for one in found]})


@router.get("/checkpoints", openapi_extra=_ANSWER)
async def all_checkpoints(request: Request, tinker: Here, limit: Limit = 100, offset: Offset = 0) -> Response:
    found = await tinker.db(tinker.store.checkpoints)
    page = [_described(one) for one in found[offset : offset + limit]]
    return respond(request, {"checkpoints": page, "cursor": _cursor(offset, limit, len(found))})


@router.post("/weights_info", openapi_extra=declares(body=schemas.OBJECT, answer=schemas.OBJECT))
async def weights_info(request: Request, tinker: Here) -> Response:
    found = await tinker.db(tinker.store.checkpoint, specs.text(await read_body(request), "tinker_path"))
    spec = found.spec
    flags = {"train_unembed": False, "train_mlp": spec["mlp"], "train_attn": spec["attention"]}
    rank = {"is_lora": bool(spec["rank"]), "lora_rank": spec["rank"] or None}
    return respond(request, {"base_model": spec["base"], **rank, **flags})


@router.delete(f"/{_CHECKPOINT}", openapi_extra=_ANSWER)
async def delete_checkpoint(request: Request, model: str, kind: str, name: str, tinker: Here) -> Response:
    await tinker.db(tinker.store.delete_checkpoint, _path(model, kind, name))
    return respond(request, {})


@router.post(f"/{_CHECKPOINT}/publish", openapi_extra=_ANSWER)
async def publish(request: Request, model: str, kind: str, name: str, tinker: Here) -> Response:
    """Mark a checkpoint as public; every caller of this server can load it anyway."""
    await tinker.db(tinker.store.publish_checkpoint, _path(model, kind, name), public=True)
    return respond(request, {})


@router.delete(f"/{_CHECKPOINT}/publish", openapi_extra=_ANSWER)
async def unpublish(request: Request, model: str, kind: str, name: str, tinker: Here) -> Response:
    await tinker.db(tinker.store.publish_checkpoint, _path(model, kind, name), public=False)
    return respond(request, {})


@router.put(f"/{_CHECKPOINT}/ttl", openapi_extra=declares(body=schemas.OBJECT, answer=schemas.OBJECT))
async def set_ttl(request: Request, model: str, kind: str, name: str, tinker: Here) -> Response:
    """Let a checkpoint expire after `ttl_seconds`; null: never."""
    ttl = specs.ttl((await read_body(request)).get("ttl_seconds"))
    expires = None if ttl is None else time.time() + ttl
    await tinker.db(tinker.store.expire_checkpoint, _path(model, kind, name), expires)
    return respond(request, {})


@router.get(f"/{_CHECKPOINT}/external_weights_urls", openapi_extra=_ANSWER)
async def external_weights_urls(request: Request, model: str, kind: str, name: str, tinker: Here) -> Response:
    """Signed addresses of a checkpoint's files, which need no API key and expire after an hour."""
    found = await tinker.db(tinker.store.checkpoint, _path(model, kind, name))
    if found.kind != "external":
        raise InputError(f"{found.path} was not saved for download", "call save_weights_external")
    folder, expires = Path(found.file).parent.name, int(time.time() + _URL_S)
    files = await asyncio.to_thread(lambda: [one.name for one in (tinker.store.folder / "external" / folder).iterdir()])
    root = f"{request.base_url}api/v1/external_weights"
    urls = {file: f"{root}/{_signature(expires, folder, file)}/{expires}/{folder}/{file}" for file in sorted(files)}
    return respond(request, {"urls": urls, "expires": _time(expires)})


@router.get("/external_weights/{signature}/{expires}/{folder}/{file}", openapi_extra=declares_bytes(200))
async def external_weights(signature: str, expires: int, folder: str, file: str, tinker: Here) -> Response:
    """A file of an exported checkpoint. The signature takes the place of an API key."""
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), _signature(expires, folder, file).encode()):
        raise Forbidden("the address is not one that this server has signed", "ask for external_weights_urls again")
    path = tinker.store.folder / "external" / folder / file
    if expires < time.time() or not await asyncio.to_thread(path.is_file):
        raise Expired("the address, or its checkpoint, has expired", "ask for external_weights_urls again")
    return FileResponse(path, media_type="application/octet-stream")


def _signature(expires: int, folder: str, file: str) -> str:
    return hmac.new(_KEY, f"{expires} {folder} {file}".encode("utf-8", "replace"), "sha256").hexdigest()


def _path(model: str, kind: str, name: str) -> str:
    return f"tinker://{model}/{kind}/{name}"


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


async def _run(tinker: TinkerService, model: str) -> dict[str, Any]:
    spec = await tinker.db(tinker.store.model, model)
    found = await tinker.db(tinker.store.checkpoints, model)
    last = {kind: next((_described(one) for one in found if one.kind == kind), None) for kind in _KINDS}
    return {
        "training_run_id": model,
        "base_model": spec["base"],
        "model_owner": "volley",
        "is_lora": bool(spec["rank"]),
        "lora_rank": spec["rank"] or None,
        "corrupted": False,
        "last_request_time": _time(spec["seen"]),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": spec.get("metadata"),
    }


def _described(one: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{_KINDS[one.kind]}/{one.name}",
        "checkpoint_type": one.kind,
        "time": _time(one.created),
        "tinker_path": one.path,
        "size_bytes": one.size,
        "public": one.public,
        "user_metadata": one.metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
