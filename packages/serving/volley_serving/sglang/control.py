"""SGLang's routes that control and describe a server or load weights, for its routers and other projects' trainers.

SGLang routes that this server cannot support answer 422 with the reason (REFUSED) rather than "not found".
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api.routes import Rollout, RolloutState, commit_mode, text_field, update
from services.rollout.api.validation import boolean, short
from services.rollout.engines.staged import CommitMode
from shared.errors import InputError, VolleyError
from shared.web import refused
from shared.web.access import Role
from shared.web.http import read_body, respond
from shared.web.openapi import declares
from shared.web.routes import ServiceRoutes
from volley_serving.sglang import schemas
from volley_serving.sglang.names import check_names

router = APIRouter()
ROLES = {
    "GET /health_generate": Role.ANYONE,
    "GET /get_weight_version": Role.VIEWER,
    "GET /model_info": Role.VIEWER,
    "GET /get_model_info": Role.VIEWER,
    "GET /v1/loads": Role.VIEWER,
    "GET /get_load": Role.VIEWER,
    "POST /update_weights_from_disk": Role.ADMIN,
    "POST /pause_generation": Role.ADMIN,
    "POST /continue_generation": Role.ADMIN,
    "GET /flush_cache": Role.ADMIN,
    "POST /flush_cache": Role.ADMIN,
    "GET /resume_memory_occupation": Role.ADMIN,
    "POST /resume_memory_occupation": Role.ADMIN,
}
DISK_FIELDS = frozenset({"model_path", "mode", "abort_all_requests", "flush_cache", "keep_pause", "weight_version"})
"""Fields of /update_weights_from_disk that are honoured."""
DISK_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors", None),
    "is_async": (False, None),
    "torch_empty_cache": (True, False, None),
    "recapture_cuda_graph": (True, False, None),
    "token_step": (0, None),
    "manifest": (None,),
}
"""Its other fields, with the values that ask for nothing; any other value is refused."""
_MAX_NAME = 200
_FROM_DISK = "write a Hugging Face folder and send its path to /update_weights_from_disk"
_NO_GROUP = ("weights do not arrive over NCCL or shared memory", _FROM_DISK)
_NO_LORA = ("adapters are not loaded by name", f"merge them; {_FROM_DISK}")
_NO_OFFLOAD = (
    "the engine keeps the memory of weights and cache as long as it runs",
    "give trainer and server devices of their own: no --offload-rollout (slime), free_cache_engine=False (verl)",
)
_NO_PROFILE = ("there is no profiler behind HTTP", "see docs/metrics.md for what is measured")
_NOT_THE_MODEL = ("a causal language model is served", "use /generate")
REFUSED: Mapping[str, tuple[str, str]] = {
    "/release_memory_occupation": _NO_OFFLOAD,
    "/pull_weights": ("the server copies no checkpoints between folders", _FROM_DISK),
    "/init_weights_update_group": _NO_GROUP,
    "/destroy_weights_update_group": _NO_GROUP,
    "/update_weights_from_distributed": _NO_GROUP,
    "/update_weights_from_tensor": _NO_GROUP,
    "/update_weights_from_ipc": _NO_GROUP,
    "/begin_weight_update": _NO_GROUP,
    "/end_weight_update": _NO_GROUP,
    "/update_weight_version": (
        "a version names the weights it was loaded with",
        "name it as weight_version of /update_weights_from_disk",
    ),
    "/get_weights_by_name": ("weights are not read parameter by parameter", "read the checkpoint"),
    "/weights_checker": ("arrays are audited by the server itself", "see /weights and the metric volley_distrusted"),
    "/load_lora_adapter": _NO_LORA,
    "/unload_lora_adapter": _NO_LORA,
    "/open_session": ("a request carries its whole prompt; the prefix cache finds what is known", "use /generate"),
    "/close_session": ("there are no sessions", "use /generate"),
    "/start_profile": _NO_PROFILE,
    "/stop_profile": _NO_PROFILE,
    "/set_internal_state": ("settings do not change while the server runs", "start it with other settings"),
    "/slow_down": ("the server is not slowed down on request", "remove it from the request"),
    "/encode": _NOT_THE_MODEL,
    "/classify": _NOT_THE_MODEL,
}
"""Routes of SGLang that are answered 422: reason and hint."""


@router.get("/health_generate", tags=["info"], openapi_extra=declares(answer=schemas.STATE))
async def health_generate(request: Request, state: Rollout) -> Response:
    """Answer 200 if requests may be routed here; the engine shows that it steps without sampling a token for this."""
    if (error := state.generation.why_not()) is not None:
        raise error
    return respond(request, {"status": "ok"})


@router.get("/get_weight_version", tags=["info"], openapi_extra=declares(answer=schemas.WEIGHT_VERSION))
async def get_weight_version(request: Request, state: Rollout) -> Response:
    return respond(request, {"weight_version": state.updates.current})


@router.get("/model_info", tags=["info"], openapi_extra=declares(answer=schemas.MODEL))
@router.get("/get_model_info", tags=["info"], openapi_extra=declares(answer=schemas.MODEL))
async def get_model_info(request: Request, state: Rollout) -> Response:
    info, path, model = state.info, state.spec.model_path, state.updates.model
    return respond(
        request,
        {
            "model_path": path,
            "served_model_name": state.model_name,
            "tokenizer_path": path,
            "model_type": model.model_type,
            "architectures": [model.family.architecture],
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "preferred_sampling_params": None,
            "weight_version": state.updates.current,
            "vocab_size": info.vocab_size,
            "context_length": info.context_length,
            "eos_token_ids": list(info.eos_token_ids),
        },
    )


@router.get("/v1/loads", tags=["info"], openapi_extra=declares(answer=schemas.LOADS))
async def loads(request: Request, state: Rollout) -> Response:
    """Return running and waiting requests; every section is there, whichever `include` names."""
    return respond(
        request,
        {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": f"volley-{state.updates.declared.kind}",
            "loads": [await _load(state)],
        },
    )


@router.get("/get_load", tags=["info"], openapi_extra=declares(answer=schemas.LOAD))
async def get_load(request: Request, state: Rollout) -> Response:
    """Return the load as older routers read it."""
    load = await _load(state)
    row = {"dp_rank": 0, "num_reqs": load["num_total_reqs"], "num_waiting_reqs": load["num_waiting_reqs"]}
    return respond(request, [{**row, "num_tokens": load["num_used_tokens"]}])


async def _load(state: RolloutState) -> dict[str, Any]:
    status, info = await state.engine.status(), state.info
    waiting = max(status.queued, state.generation.n_requests - status.running)
    used = max(0, info.max_total_tokens - status.free_kv_tokens - status.cached_kv_tokens)
    return {
        "dp_rank": 0,
        "num_running_reqs": status.running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": status.running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": info.max_total_tokens,
        "token_usage": used / info.max_total_tokens,
        "max_running_requests": info.max_running_requests,
        "utilization": status.running / info.max_running_requests,
    }


@router.post("/pause_generation", tags=["control"], openapi_extra=declares(body=schemas.PAUSE, answer=schemas.STATE))
async def pause_generation(request: Request, state: Rollout) -> Response:
    """Stop decoding. `mode`: abort (SGLang's default) ends running requests, in_place keeps their state, retract frees
    the cache.
    """
    mode = commit_mode(await _optional_body(request)) or "abort"
    await state.engine.pause()
    if mode == "retract":
        await state.engine.flush_cache()
    elif mode == "abort":
        await state.engine.abort(None)
    return respond(request, {"status": "paused"})


@router.post(
    "/continue_generation", tags=["control"], openapi_extra=declares(body=schemas.CONTINUE, answer=schemas.STATE)
)
async def continue_generation(request: Request, state: Rollout) -> Response:
    """Decode again; a body is not needed."""
    boolean("torch_empty_cache", (await _optional_body(request)).get("torch_empty_cache"))
    await state.engine.resume()
    return respond(request, {"status": "running"})


@router.get("/flush_cache", tags=["control"], openapi_extra=declares(answer=schemas.STATE))
@router.post("/flush_cache", tags=["control"], openapi_extra=declares(answer=schemas.STATE))
async def flush_cache(request: Request, state: Rollout) -> Response:
    """Drop cached prefixes; running requests keep their tokens and compute their prefixes again."""
    await state.engine.flush_cache()
    return respond(request, {"status": "flushed"})


@router.get("/resume_memory_occupation", tags=["control"], openapi_extra=declares(answer=schemas.DONE))
@router.post(
    "/resume_memory_occupation", tags=["control"], openapi_extra=declares(body=schemas.TAGS, answer=schemas.DONE)
)
async def resume_memory_occupation(request: Request) -> Response:
    """Succeed: the memory is never released."""
    tags = (await _optional_body(request)).get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) and tag for tag in tags)):
        raise InputError(f"tags must be a list of texts, not {short(tags)}")
    return respond(request, {"success": True, "message": "the memory of weights and cache was not released"})


@router.post(
    "/update_weights_from_disk",
    tags=["weights"],
    openapi_extra=declares(body=schemas.UPDATE_FROM_DISK, answer=schemas.UPDATED_FROM_DISK),
)
async def update_weights_from_disk(request: Request, state: Rollout) -> Response:
    """Stage and commit `model_path`, a checkpoint or a Hugging Face folder below the weights root, whose weights are
    called `weight_version` (default: as the folder). `keep_pause` pauses decoding before, unless the weights are
    refused.
    """
    body = await read_body(request)
    check_names(body, DISK_FIELDS, DISK_NEUTRAL, "")
    path, mode = text_field(body, "model_path"), _disk_mode(body)
    name = None if body.get("weight_version") is None else text_field(body, "weight_version")
    if name is not None and len(name) > _MAX_NAME:
        raise InputError(f"weight_version has {len(name)} characters, but at most {_MAX_NAME} are allowed")
    pauses = boolean("keep_pause", body.get("keep_pause")) and not (await state.engine.status()).paused
    if pauses:
        await state.engine.pause()
    try:
        done = await update(state, path, mode, name)
    except VolleyError:
        if pauses:
            await state.engine.resume()
        raise
    return respond(
        request, {"success": True, "message": f"serving {done['version']}", "num_paused_requests": 0, **done}
    )


def _disk_mode(body: dict[str, Any]) -> CommitMode | None:
    """Read what happens to running requests: `mode`, or SGLang's flags. Raises InputError."""
    aborts = boolean("abort_all_requests", body.get("abort_all_requests"))
    flushes = body.get("flush_cache") is None or boolean("flush_cache", body["flush_cache"])
    return commit_mode(body) or ("abort" if aborts else None if flushes else "in_place")


refused.add(router, REFUSED)
ROLES |= {f"{method} {path}": Role.ADMIN for method in refused.METHODS for path in REFUSED}
ROUTES = ServiceRoutes(router, ROLES)


async def _optional_body(request: Request) -> dict[str, Any]:
    """Read the body; an absent one is empty."""
    return await read_body(request) if await request.body() else {}
