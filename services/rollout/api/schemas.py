"""JSON schemas of the rollout server's bodies, for the OpenAPI page. `validation` and `routes` check requests."""

from __future__ import annotations

from typing import Any, get_args

from services.rollout.api import validation
from services.rollout.engines.base import FinishType
from services.rollout.engines.staged import CommitMode
from shared.engine_kinds import CAPABILITIES

type Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": ["boolean", "null"]}
VERSION: Schema = {"type": ["string", "null"]}
MODE: Schema = {"enum": [*get_args(CommitMode), None]}


def object_of(required: Schema, optional: Schema | None = None, *, closed: bool = False) -> Schema:
    closing = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required), **closing}


def with_example(schema: Schema, **body: Any) -> Schema:
    """Add an example request that the OpenAPI page can send."""
    return {**schema, "examples": [body]}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


SAMPLING: Schema = {
    "max_new_tokens": number(0, validation.MAX_NEW_TOKENS, "integer"),
    "temperature": number(0, validation.MAX_TEMPERATURE),
    "top_p": number(validation.MIN_TOP_P, 1),
    "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": validation.MAX_TOP_K, "not": {"const": 0}},
    "stop_token_ids": or_null({"type": "array", "items": COUNT, "maxItems": validation.MAX_STOPS}),
    "ignore_eos": FLAG,
    "sampling_seed": number(0, validation.MAX_SEED, "integer"),
}
GENERATE: Schema = {
    "input_ids": {"type": "array", "items": COUNT, "minItems": 1},
    "rid": or_null({"type": "string", "maxLength": validation.MAX_RID}),
    "return_logprob": {**FLAG, "description": "true if it is left out"},
    "logprob_start_len": {
        "type": ["integer", "null"],
        "description": "first position of the prompt whose token is listed with its log-probability; -1, and the "
        "length of the prompt, list none (default: -1, with max_new_tokens 0 it is 0)",
        "minimum": -1,
    },
    "return_routed_experts": {**FLAG, "description": "experts that tokens were sent to (default: false)"},
    "routed_experts_start_len": {
        "type": ["integer", "null"],
        "description": "first position of the prompt with experts (default: 0)",
        "minimum": 0,
    },
}
"""Fields of /generate that the core knows, and in `SAMPLING` those of its `sampling_params`."""
TOKENS = with_example(
    object_of({}, {**GENERATE, "sampling_params": or_null(object_of({}, SAMPLING, closed=True))}, closed=True),
    input_ids=[1, 2, 3],
    sampling_params={"max_new_tokens": 8, "temperature": 1.0},
)
_SPAN = object_of({"version": {"type": "string"}, "start": COUNT, "end": COUNT})
ROW: Schema = {
    "type": "array",
    "description": "[log-probability, token id, text or null]; with msgpack a float32 array of the first alone",
}
META: Schema = {
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
    "cached_tokens": COUNT,
    "finish_reason": object_of({"type": {"enum": list(get_args(FinishType))}}),
    "weight_versions": {"type": "array", "items": _SPAN},
    "weight_version": VERSION,
}
META_LISTS: Schema = {
    "id": {"type": "string"},
    "routed_experts": {
        "type": ["string", "object"],
        "description": "experts of shape [positions, layers, experts a token], without the last token's: "
        "int32 as base64; with msgpack {shape, ids}",
    },
    "output_token_logprobs": {"type": "array", "items": {"anyOf": [ROW, {"type": "number"}]}},
    "input_token_logprobs": {
        "type": "array",
        "items": ROW,
        "description": "from logprob_start_len on; the first row has null for its log-probability",
    },
}
OUTPUT_IDS: Schema = {"type": "array", "items": COUNT}
SAMPLED = object_of({"output_ids": OUTPUT_IDS, "meta_info": object_of(META, META_LISTS)})

_TIMINGS: Schema = {"type": "object", "description": "seconds", "additionalProperties": {"type": "number"}}
COMMITTED_FIELDS: Schema = {
    "version": {"type": "string"},
    "previous": VERSION,
    "continued": COUNT,
    "aborted": COUNT,
    "timings": _TIMINGS,
}
_VERSION_NAME = "e000001-s000001"
CHECKPOINT = f"runs/quickstart/checkpoints/{_VERSION_NAME}"
_OFFER = {
    "version": TEXT,
    "manifest": object_of({"blake3": TEXT, "size": COUNT}),
    "sources": {"type": "array", "items": TEXT},
}
STAGE = with_example({"anyOf": [object_of({"manifest": TEXT}), object_of(_OFFER)]}, manifest=CHECKPOINT)
STAGED = object_of({"staged": {"type": "string"}, "digest": {"type": "string"}, "timings": _TIMINGS})
COMMIT = with_example(
    object_of({"version": TEXT}, {"base_version": or_null(TEXT), "mode": MODE}), version=_VERSION_NAME
)
COMMITTED = object_of(COMMITTED_FIELDS)
HOLD = with_example(
    object_of({"holder": TEXT, "version": TEXT}, {"seconds": {"type": "number", "minimum": 0}}),
    holder="evaluation",
    version=_VERSION_NAME,
    seconds=20,
)
HELD = object_of({"version": TEXT, "seconds": {"type": "number"}})
ENGINE = object_of(
    {"kind": {"type": "string"}, "capabilities": {"type": "array", "items": {"enum": list(CAPABILITIES)}}}
)
UPDATED = object_of({**COMMITTED_FIELDS, "engine": ENGINE})
UPDATE = with_example(
    {"anyOf": [object_of({"manifest": TEXT}, {"mode": MODE}), object_of(_OFFER, {"mode": MODE})]}, manifest=CHECKPOINT
)
_REFUSED = object_of({"version": TEXT, "reason": TEXT})
WEIGHTS = object_of(
    {"current": VERSION, "staged": VERSION, "digest": VERSION, "arriving": VERSION, "refused": or_null(_REFUSED)}
)
ABORT = with_example({"anyOf": [object_of({"rid": TEXT}), object_of({"abort_all": {"const": True}})]}, rid="1")
ABORTED = object_of({"aborted": COUNT})
SERVER = object_of(
    {"engine": ENGINE, "internal_state": {"type": "object"}, "version": {"type": "string"}, "tp_size": COUNT}
)
