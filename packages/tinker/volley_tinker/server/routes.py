"""Routes of training and sampling, as the `tinker` SDK calls them. Bodies are JSON; a pass may be a protocol buffer.

A route of the SDK that this server cannot honour answers 422 with the reason (REFUSED).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shared.errors import Expired
from shared.web import refused
from shared.web.access import Role
from shared.web.http import read_body, respond
from shared.web.openapi import declares
from volley_tinker.server import messages, samples, schemas, specs
from volley_tinker.server.entries import JSON, Future
from volley_tinker.server.entries import Request as Recorded
from volley_tinker.server.messages import PROTOBUF
from volley_tinker.server.service import TinkerService, json_request

router = APIRouter(prefix="/api/v1")
_WAIT_S = 20.0
_POSTS = (
    "client/config",
    "client/dynamic_config",
    "create_session",
    "session_heartbeat",
    "sessions/{session}/finish",
    "create_model",
    "get_info",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "create_sampling_session",
    "join_sampling_session",
    "asample",
    "retrieve_future",
    "cancel_future",
    "telemetry",
)
_NO_UPLOADED_LOSS = ("losses are not uploaded", "forward_backward_custom computes them in the client")
_NO_BILLING = ("nothing is billed here", "remove it from the request")
REFUSED: Mapping[str, tuple[str, str]] = {
    "auth/token": ("keys are not exchanged for tokens", "send the API key"),
    "create_custom_loss": _NO_UPLOADED_LOSS,
    "retrieve_futures": ("futures are retrieved one by one", "call retrieve_future"),
    "copy_weights": ("there are no projects to copy weights into", "load the checkpoint by its tinker:// path"),
    "billing/usage/events": _NO_BILLING,
    "billing/usage/checkpoints/current": _NO_BILLING,
    "audit_log": ("there is no audit log", "the ledger of futures is checked by `volley verify FOLDER`"),
    "sessions/search": ("sessions are not searched", "list them"),
}
"""Routes of the SDK that are answered 422: reason and hint."""
ROLES = {
    "GET /api/v1/healthz": Role.ANYONE,
    "GET /api/v1/get_server_capabilities": Role.SERVICE,
    **{f"POST /api/v1/{path}": Role.SERVICE for path in _POSTS},
    **{f"{method} /api/v1/{path}": Role.SERVICE for method in refused.METHODS for path in REFUSED},
}


async def _tinker(request: Request) -> TinkerService:
    return request.app.state.tinker


Here = Annotated[TinkerService, Depends(_tinker)]


@router.get("/healthz", tags=["service"], openapi_extra=declares(answer=schemas.OBJECT))
async def healthz(request: Request) -> Response:
    return respond(request, {"status": "ok"})


@router.get("/get_server_capabilities", tags=["service"], openapi_extra=declares(answer=schemas.CAPABILITIES))
async def get_server_capabilities(request: Request, tinker: Here) -> Response:
    """The one base model of this server."""
    model = {"model_name": tinker.name, "max_context_length": tinker.context}
    return respond(request, {"supported_models": [{**model, "trainable": True, "sampleable": bool(tinker.servers)}]})


@router.post("/client/config", tags=["service"], openapi_extra=declares(body=schemas.OBJECT, answer=schemas.OBJECT))
async def client_config(request: Request) -> Response:
    """Settings of the SDK: its defaults, without the features of REFUSED."""
    return respond(request, {"pjwt_auth_enabled": False, "sample_join_sampling_session": True})


@router.post(
    "/client/dynamic_config", tags=["service"], openapi_extra=declares(body=schemas.OBJECT, answer=schemas.OBJECT)
)
async def client_dynamic_config(request: Request) -> Response:
    return respond(request, {"refresh_interval_sec": 3600})


@router.post("/telemetry", tags=["service"], openapi_extra=declares(body=schemas.OBJECT, answer=schemas.OBJECT))
async def telemetry(request: Request) -> Response:
    """Accept events of the SDK, and drop them."""
    await read_body(request)
    return respond(request, {"status": "accepted"})


@router.post("/create_session", tags=["service"], openapi_extra=declares(body=schemas.SESSION, answer=schemas.OBJECT))
async def create_session(request: Request, tinker: Here) -> Response:
    body = await read_body(request)
    described = {"user_metadata": specs.metadata(body.get("user_metadata")), "display_name": body.get("display_name")}
    session = await tinker.create_session(described)
    return respond(request, {"type": "create_session", "session_id": session})


@router.post(
    "/session_heartbeat", tags=["service"], openapi_extra=declares(body=schemas.OF_SESSION, answer=schemas.OBJECT)
)
async def session_heartbeat(request: Request, tinker: Here) -> Response:
    session = specs.text(await read_body(request), "session_id")
    _, finished = await tinker.db(tinker.store.session, session)
    if finished is not None:
        raise Expired(f"session {session} has finished: {finished}")
    await tinker.db(tinker.store.touch_session, session)
    return respond(request, {"type": "session_heartbeat"})


@router.post(
    "/sessions/{session}/finish", tags=["service"], openapi_extra=declares(body=schemas.FINISH, answer=schemas.OBJECT)
)
async def finish(request: Request, session: str, tinker: Here) -> Response:
    """Finish a session; the first reason stays. Its models can be trained no more; checkpoints stay."""
    reason = (await read_body(request)).get("reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    await tinker.finish_session(session, str(kind)[:200])
    return respond(request, {})


@router.post("/create_model", tags=["training"], openapi_extra=declares(body=schemas.MODEL, answer=schemas.FUTURE))
async def create_model(request: Request, tinker: Here) -> Response:
    """Make a model on the base: adapters of `lora_config`, or with rank 0 or none of it all parameters."""
    return _future(request, await tinker.create_model(await read_body(request)))


@router.post("/get_info", tags=["training"], openapi_extra=declares(body=schemas.OF_MODEL, answer=schemas.OBJECT))
async def get_info(request: Request, tinker: Here) -> Response:
    model = specs.text(await read_body(request), "model_id")
    spec = await tinker.db(tinker.store.model, model)
    described = {"arch": tinker.architecture, "model_name": spec["base"], "tokenizer_id": tinker.tokenizer}
    lora = {"is_lora": bool(spec["rank"]), "lora_rank": spec["rank"] or None}
    answer = {"type": "get_info", "model_data": described, "model_id": model, "model_name": spec["base"], **lora}
    return respond(request, answer)


@router.post("/forward", tags=["training"], openapi_extra=declares(body=schemas.PASS, answer=schemas.FUTURE))
async def forward(request: Request, tinker: Here) -> Response:
    """Compute log-probabilities and loss only."""
    return await _pass(request, tinker, forward_only=True)


@router.post("/forward_backward", tags=["training"], openapi_extra=declares(body=schemas.PASS, answer=schemas.FUTURE))
async def forward_backward(request: Request, tinker: Here) -> Response:
    """Compute the loss, and add its gradient to the model's."""
    return await _pass(request, tinker, forward_only=False)


async def _pass(request: Request, tinker: TinkerService, *, forward_only: bool) -> Response:
    if request.headers.get("content-type", "").startswith(PROTOBUF):
        data, media = await request.body(), PROTOBUF
        asked = messages.pass_from_protobuf(data)
        forward_only = forward_only or asked.forward_only
    else:
        body, media = await read_body(request), JSON
        data = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        asked = messages.pass_from_json(body, forward_only=forward_only)
    kind = "forward" if forward_only else "forward_backward"
    return _future(
        request, await tinker.submit(Recorded(asked.model_id, asked.seq_id, kind, data, media, asked.digest()))
    )


@router.post("/optim_step", tags=["training"], openapi_extra=declares(body=schemas.STEP, answer=schemas.FUTURE))
async def optim_step(request: Request, tinker: Here) -> Response:
    """Take a step of AdamW with the accumulated gradient, and clear that."""
    return await _of_model(request, tinker, "optim_step")


@router.post("/save_weights", tags=["weights"], openapi_extra=declares(body=schemas.SAVE, answer=schemas.FUTURE))
async def save_weights(request: Request, tinker: Here) -> Response:
    """Save parameters and optimizer state as tinker://MODEL/weights/NAME."""
    return await _of_model(request, tinker, "save_weights")


@router.post(
    "/save_weights_for_sampler", tags=["weights"], openapi_extra=declares(body=schemas.SAVE, answer=schemas.FUTURE)
)
async def save_weights_for_sampler(request: Request, tinker: Here) -> Response:
    """Save parameters as tinker://MODEL/sampler_weights/NAME, and open a session of them if it is numbered."""
    return await _of_model(request, tinker, "save_weights_for_sampler")


@router.post(
    "/save_weights_external", tags=["weights"], openapi_extra=declares(body=schemas.SAVE, answer=schemas.FUTURE)
)
async def save_weights_external(request: Request, tinker: Here) -> Response:
    """Save adapters as PEFT does, or all parameters as a Hugging Face folder, for download."""
    return await _of_model(request, tinker, "save_weights_external")


@router.post("/load_weights", tags=["weights"], openapi_extra=declares(body=schemas.LOAD, answer=schemas.FUTURE))
async def load_weights(request: Request, tinker: Here) -> Response:
    """Load saved weights into a model, or, with `session_id` and `model_seq_id`, into a new one."""
    body = await read_body(request)
    if body.get("model_id") is None:
        return _future(request, await tinker.create_model_from(body))
    return await _of_model(request, tinker, "load_weights", body)


async def _of_model(request: Request, tinker: TinkerService, kind: str, body: dict[str, Any] | None = None) -> Response:
    body = await read_body(request) if body is None else body
    seq = specs.whole("seq_id", body.get("seq_id"), 1, 2**31)
    return _future(request, await tinker.submit(json_request(specs.text(body, "model_id"), seq, kind, body)))


@router.post(
    "/create_sampling_session", tags=["sampling"], openapi_extra=declares(body=schemas.SAMPLER, answer=schemas.OBJECT)
)
async def create_sampling_session(request: Request, tinker: Here) -> Response:
    """Open a sampling session of saved weights (`model_path`), or of the base."""
    sampler = await tinker.create_sampler(await read_body(request))
    return respond(request, {"type": "create_sampling_session", "sampling_session_id": sampler})


@router.post(
    "/join_sampling_session", tags=["sampling"], openapi_extra=declares(body=schemas.JOIN, answer=schemas.OBJECT)
)
async def join_sampling_session(request: Request, tinker: Here) -> Response:
    """Number another client of a sampling session."""
    sampler = specs.text(await read_body(request), "sampling_session_id")
    number = await tinker.db(tinker.store.join_sampler, sampler)
    return respond(request, {"type": "join_sampling_session", "client_counter": number})


@router.post("/asample", tags=["sampling"], openapi_extra=declares(body=schemas.SAMPLE, answer=schemas.FUTURE))
async def asample(request: Request, tinker: Here) -> Response:
    """Sample continuations of a prompt; the result has the log-probabilities of the prompt if they are asked for."""
    future, n = await tinker.sample(await read_body(request))
    ids = [f"{future.id}:{i}" for i in range(n)]
    return respond(request, {"request_id": future.id, "sample_sequence_ids": ids})


@router.post(
    "/retrieve_future",
    tags=["futures"],
    openapi_extra=declares(body=schemas.RETRIEVE, answer=schemas.OBJECT, statuses=(200, 408)),
)
async def retrieve_future(request: Request, tinker: Here) -> Response:
    """Wait for a result: 200 with it or with its error, 408 if it is not there yet, 410 if it has expired."""
    future = await tinker.wait(specs.text(await read_body(request), "request_id"), _WAIT_S)
    if future.outcome is None:
        return respond(request, {"type": "try_again", "request_id": future.id, "queue_state": "active"}, 408)
    if future.result is None:
        raise Expired(f"the result of {future.id} has expired", "results are kept for tinker.result_ttl_s seconds")
    if future.outcome == "failed" or future.kind not in ("forward", "forward_backward", "sample"):
        return Response(future.result, media_type=JSON)
    if PROTOBUF in request.headers.get("accept", ""):
        return Response(future.result, media_type=PROTOBUF)
    if future.kind == "sample":
        return respond(request, samples.to_json(future.result))
    return respond(request, messages.pass_to_json(messages.pass_output(future.result)))


@router.post("/cancel_future", tags=["futures"], openapi_extra=declares(body=schemas.RETRIEVE, answer=schemas.OBJECT))
async def cancel_future(request: Request, tinker: Here) -> Response:
    """Accept that nobody waits for a sample any more; it is finished all the same."""
    await tinker.db(tinker.store.future, specs.text(await read_body(request), "request_id"))
    return respond(request, {})


def _future(request: Request, future: Future) -> Response:
    return respond(request, {"request_id": future.id, "model_id": future.owner})


refused.add(router, {f"/{path}": why for path, why in REFUSED.items()})
