"""SGLang's /generate as a run's own client calls it: one prompt of token ids in msgpack, sampled or scored.

Everything else of the route (texts, JSON, batches, streams, stop strings, further parameters) is answered by a package,
whose route replaces this one (part `generate_route`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api import schemas
from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout, RolloutState
from services.rollout.api.validation import (
    MAX_RID,
    SAMPLING,
    boolean,
    build,
    integer,
    prompt_ids,
    room,
    sampling_params,
    short,
)
from services.rollout.engines.base import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    ScoredTokens,
)
from shared import codec, packages
from shared.bounds import is_one_of
from shared.errors import ContextExceeded, InputError
from shared.routing import to_wire
from shared.web.access import Role
from shared.web.edge import DirectRoute
from shared.web.http import read_body, respond
from shared.web.openapi import declares

router = APIRouter()
ROLES = {"POST /generate": Role.SERVICE}
FIELDS = frozenset(
    {
        "input_ids",
        "sampling_params",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "return_routed_experts",
        "routed_experts_start_len",
    }
)
"""Fields that the core honours."""
_PART = "generate_route"

type ReadSampling = Callable[[Any, EngineInfo, int], SamplingParams]
"""Reads `sampling_params`, for a prompt of so many tokens. Raises InputError."""
type TextOf = Callable[[int], str]
type Rows = list[list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class AskedTokens:
    """Request for a prompt, `ids` int32[n]: its continuation, or its own log-probabilities.

    Attributes:
        request: None if nothing is sampled.
        scored_from: first position whose token is listed with its log-probability; None if something is sampled.
        logprobs: list the log-probabilities of sampled tokens.
    """

    ids: np.ndarray
    request: GenerateRequest | None
    scored_from: int | None = None
    logprobs: bool = True


@router.post("/generate", tags=["generate"], openapi_extra=declares(body=schemas.TOKENS, answer=schemas.SAMPLED))
async def generate(request: Request, state: Rollout) -> Response:
    """Sample tokens after the given ids. The answer has ids, weight versions and, unless `return_logprob` is false,
    log-probabilities. With `max_new_tokens` 0 nothing is sampled, and the answer has the log-probabilities of the
    prompt from `logprob_start_len` on, at temperature 1.
    """
    raw = await read_body(request)
    if (beyond := beyond_core(request, raw)) is not None:
        raise InputError(f"{beyond}: {packages.missing(_PART)}", "install it, or send one prompt of ids as msgpack")
    return await answer(request, state, raw)


def beyond_core(request: Request, raw: Mapping[str, Any]) -> str | None:
    """Return what of a request `answer` does not know; None if it knows everything."""
    if not is_packed(request):
        return "a body in JSON"
    if not isinstance(raw.get("input_ids"), np.ndarray):
        return "input_ids that are not an array"
    sampling: Any = {} if raw.get("sampling_params") is None else raw["sampling_params"]
    if not isinstance(sampling, Mapping):
        return "sampling_params that are not an object"
    further = [*map(str, raw.keys() - FIELDS), *(f"sampling_params.{name}" for name in sampling.keys() - SAMPLING)]
    if not further and raw.get("logprob_start_len") is not None and not samples_nothing(sampling):
        further = ["logprob_start_len beside sampled tokens"]
    return min(further, default=None)


def is_packed(request: Request) -> bool:
    """True if the request's body, and so its answer, is msgpack."""
    return request.headers.get("content-type", "").startswith(codec.MEDIA_TYPE)


async def answer(request: Request, state: RolloutState, raw: Mapping[str, Any]) -> Response:
    """Answer a body in which nothing is `beyond_core`."""
    asked = read_tokens(raw, state.info)
    try:
        if asked.request is None:
            return respond(request, await _scored(state, asked, request))
        (result,) = await state.generation.run([asked.request], request.receive)
    except ClientGone:
        return Response(status_code=499)
    return respond(request, sampled(result, logprobs=asked.logprobs))


async def _scored(state: RolloutState, asked: AskedTokens, request: Request) -> dict[str, Any]:
    """Return the answer to a request that samples nothing."""
    assert asked.scored_from is not None
    start, scored = asked.scored_from, None
    if start < len(asked.ids) - 1:
        scored = await state.generation.score(asked.ids, request.receive)
    logprobs = [] if scored is None else scored.logprobs[start:].tolist()
    lists = {"output_token_logprobs": [], "input_token_logprobs": rows([None, *logprobs], asked.ids[start:].tolist())}
    return {"output_ids": [], "meta_info": scored_meta(asked.ids, scored, lists)}


def scored_meta(ids: np.ndarray, scored: ScoredTokens | None, lists: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta_info` of an answer without sampled tokens. Args: lists: of log-probabilities."""
    return {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        **lists,
        "finish_reason": {"type": "length", "length": 0},
        "weight_versions": [],
        "weight_version": scored.version if scored else None,
    }


def sampled(result: GenerateResult, *, logprobs: bool = True) -> dict[str, Any]:
    """Return SGLang's answer with arrays: `output_ids` int32[n], and `logprobs` float32[n] if they are wanted."""
    routed = result.routed_experts
    return {
        "output_ids": result.output_ids,
        "meta_info": {
            "id": result.rid,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.output_ids),
            "cached_tokens": result.cached_tokens,
            **({"output_token_logprobs": result.logprobs} if logprobs else {}),
            **({} if routed is None else {"routed_experts": to_wire(routed)}),
            "finish_reason": finish(result.finish),
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in result.versions],
            "weight_version": result.versions[-1].version if result.versions else None,
        },
    }


def finish(reason: FinishReason) -> dict[str, Any]:
    fields = {"matched": reason.matched, "length": reason.length, "message": reason.message}
    return {"type": reason.type, **{k: v for k, v in fields.items() if v is not None}}


def rows(logprobs: Sequence[float | None], ids: Sequence[int], text_of: TextOf | None = None) -> Rows:
    """Return SGLang's rows [log-probability, id, text]."""
    return [[p, t, text_of(t) if text_of else None] for p, t in zip(logprobs, ids, strict=True)]


def read_tokens(
    body: Mapping[str, Any], info: EngineInfo, read_sampling: ReadSampling = sampling_params
) -> AskedTokens:
    """Read the core's fields of a body with one prompt of ids. Raises InputError naming the field and its value."""
    ids = prompt_ids(body.get("input_ids"), info.vocab_size)
    raw: Any = {} if body.get("sampling_params") is None else body["sampling_params"]
    logprobs = wants_logprobs(body)
    if samples_nothing(raw):
        _check_scoring(body, read_sampling({**raw, "max_new_tokens": 1}, info, len(ids)), info, ids)
        start = integer("logprob_start_len", body.get("logprob_start_len"), 0, 0, len(ids) - 1)
        return AskedTokens(ids, None, start, logprobs)
    request = build(ids, read_sampling(raw, info, len(ids)), read_rid(body.get("rid")), info)
    return AskedTokens(ids, replace(request, routed_from=_routed_from(body, len(ids))), logprobs=logprobs)


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Return `return_logprob`, by default true, unlike SGLang's. Raises InputError."""
    return True if body.get("return_logprob") is None else boolean("return_logprob", body["return_logprob"])


def read_rid(rid: Any) -> str | None:
    """Read the identifier of a request. Raises InputError."""
    if rid is not None and not (isinstance(rid, str) and len(rid) <= MAX_RID):
        raise InputError(f"rid must be a string of up to {MAX_RID} characters, not {short(rid)}")
    return rid


def samples_nothing(sampling: Any) -> bool:
    """True if only log-probabilities of the prompt are requested: `max_new_tokens` is 0."""
    return isinstance(sampling, Mapping) and is_one_of(sampling.get("max_new_tokens"), (0,))


def _check_scoring(body: Mapping[str, Any], sampling: SamplingParams, info: EngineInfo, ids: np.ndarray) -> None:
    """Check a body that samples nothing. Raises InputError."""
    if sampling.temperature not in (0.0, 1.0):
        raise InputError(
            f"temperature={sampling.temperature:g}: a prompt is scored at temperature 1", "remove it from the request"
        )
    if body.get("return_logprob") is not True:
        raise InputError("max_new_tokens=0 without return_logprob requests nothing", "send return_logprob=true")
    if len(ids) > room(info):
        raise ContextExceeded.of(room(info), len(ids))
    if _routed_from(body, len(ids)) is not None:
        raise InputError(
            "return_routed_experts needs sampled tokens, and max_new_tokens is 0", "remove it from the request"
        )


def _routed_from(body: Mapping[str, Any], n_prompt: int) -> int | None:
    """Return the first position of the prompt for which experts are wanted; None for none. Raises InputError."""
    start = integer("routed_experts_start_len", body.get("routed_experts_start_len"), 0, 0, n_prompt)
    return start if boolean("return_routed_experts", body.get("return_routed_experts")) else None


async def _answer(request: Request) -> Response:
    return await generate(request, request.app.state.rollout)


def direct_routes() -> list[DirectRoute]:
    """The route of every turn, which FastAPI would slow down."""
    return [DirectRoute("POST", "/generate", _answer)]
