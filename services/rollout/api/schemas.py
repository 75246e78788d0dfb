"""JSON schemas of the rollout server's bodies, for the OpenAPI page. `validation` and `routes` check requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from services.rollout.api import generate_body, validation
from services.rollout.engines.base import MAX_TOP_LOGPROBS, FinishType
from services.rollout.engines.staged import CommitMode
from shared.engine_kinds import CAPABILITIES

type Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_VERSION: Schema = {"type": ["string", "null"]}
_MODE: Schema = {"enum": [*get_args(CommitMode), None]}


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None, *, closed: bool = False) -> Schema:
    closing = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required), **closing}


def _with_example(schema: Schema, **body: Any) -> Schema:
    """Add an example request that the OpenAPI page can send."""
    return {**schema, "examples": [body]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


_STOP: Schema = _or_null(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 64}]}
)
_FLAG: Schema = {"type": ["boolean", "null"]}
_SAMPLING = _object(
    {},
    {
        "max_new_tokens": _number(0, validation.MAX_NEW_TOKENS, "integer"),
        "temperature": _number(0, validation.MAX_TEMPERATURE),
        "top_p": _number(validation.MIN_TOP_P, 1),
        "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": validation.MAX_TOP_K, "not": {"const": 0}},
        "stop": _STOP,
        "stop_token_ids": _or_null({"type": "array", "items": _COUNT, "maxItems": validation.MAX_STOPS}),
        "ignore_eos": _FLAG,
        "sampling_seed": _number(0, validation.MAX_SEED, "integer"),
        "n": _number(1, generate_body.MAX_SAMPLES, "integer"),
        "skip_special_tokens": _FLAG,
        "no_stop_trim": _FLAG,
        "stream_interval": _number(1, generate_body.MAX_INTERVAL, "integer"),
        "min_p": _number(0, 1),
        "min_new_tokens": _number(0, validation.MAX_NEW_TOKENS, "integer"),
        "frequency_penalty": _number(-validation.MAX_PENALTY, validation.MAX_PENALTY),
        "presence_penalty": _number(-validation.MAX_PENALTY, validation.MAX_PENALTY),
        "logit_bias": _or_null({"type": "object", "maxProperties": validation.MAX_BIASES}),
        "json_schema": _or_null({"type": "string"}),
        "regex": _or_null({"type": "string"}),
        "lark": _or_null({"type": "string"}),
        **{name: {"enum": list(values)} for name, values in validation.NEUTRAL.items()},
    },
    closed=True,
)
_SPAN = _object({"version": {"type": "string"}, "start": _COUNT, "end": _COUNT})
_ROW: Schema = {
    "type": "array",
    "description": "[log-probability, token id, text or null]; with msgpack a float32 array of the first alone",
}
_TIMINGS: Schema = {"type": "object", "description": "seconds", "additionalProperties": {"type": "number"}}
_COMMITTED = {
    "version": {"type": "string"},
    "previous": _VERSION,
    "continued": _COUNT,
    "aborted": _COUNT,
    "timings": _TIMINGS,
}

_VERSION_NAME = "e000001-s000001"
_CHECKPOINT = f"runs/quickstart/checkpoints/{_VERSION_NAME}"
_GENERATE: Schema = _object(
    {},
    {
        "input_ids": {"type": "array", "items": _COUNT, "minItems": 1},
        "text": _TEXT,
        "sampling_params": _or_null(_SAMPLING),
        "rid": _or_null({"type": "string", "maxLength": validation.MAX_RID}),
        "stream": _FLAG,
        "return_logprob": {**_FLAG, "description": "true if it is left out"},
        "logprob_start_len": {
            "type": ["integer", "null"],
            "description": "first position of the prompt whose token is listed with its log-probability; -1, and the "
            "length of the prompt, list none (default: -1, with max_new_tokens 0 it is 0)",
            "minimum": -1,
        },
        "top_logprobs_num": _number(0, MAX_TOP_LOGPROBS, "integer"),
        generate_body.TEXTS: _FLAG,
        "return_prompt_token_ids": _FLAG,
        "return_routed_experts": {**_FLAG, "description": "experts that tokens were sent to (default: false)"},
        "routed_experts_start_len": {
            "type": ["integer", "null"],
            "description": "first position of the prompt with experts (default: 0)",
            "minimum": 0,
        },
        **{name: {} for name in sorted(generate_body.LABELS)},
        **{name: {"enum": list(values)} for name, values in generate_body.NEUTRAL_FIELDS.items()},
    },
    closed=True,
) | {
    "oneOf": [{"required": ["input_ids"]}, {"required": ["text"]}],
    "description": "As msgpack, input_ids may be an array. For a batch, text and input_ids are lists of prompts, other "
    "fields may be lists with a value for each, and the answer is a list.",
}
GENERATE = _with_example(_GENERATE, input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 8, "temperature": 1.0})
_LIST: Schema = {"type": "array"}
_GENERATED = _object(
    {
        "output_ids": {"type": "array", "items": _COUNT},
        "meta_info": _object(
            {
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "cached_tokens": _COUNT,
                "finish_reason": _object({"type": {"enum": list(get_args(FinishType))}}),
                "weight_versions": {"type": "array", "items": _SPAN},
                "weight_version": _VERSION,
            },
            {
                "id": {"type": "string"},
                "routed_experts": {
                    "type": ["string", "object"],
                    "description": "experts of shape [positions, layers, experts a token], without the last token's: "
                    "int32 as base64; with msgpack {shape, ids}",
                },
                "output_token_logprobs": {"type": "array", "items": {"anyOf": [_ROW, {"type": "number"}]}},
                "output_top_logprobs": _LIST,
                "input_token_logprobs": {
                    "type": "array",
                    "items": _ROW,
                    "description": "from logprob_start_len on; the first row has null for its log-probability",
                },
                "input_top_logprobs": _LIST,
            },
        ),
    },
    {"text": {"type": "string"}, "prompt_token_ids": {"type": "array", "items": _COUNT}},
)
GENERATED: Schema = {"anyOf": [_GENERATED, {"type": "array", "items": _GENERATED, "description": "of a batch"}]}

_OFFER = {
    "version": _TEXT,
    "manifest": _object({"blake3": _TEXT, "size": _COUNT}),
    "sources": {"type": "array", "items": _TEXT},
}
STAGE = _with_example({"anyOf": [_object({"manifest": _TEXT}), _object(_OFFER)]}, manifest=_CHECKPOINT)
STAGED = _object({"staged": {"type": "string"}, "digest": {"type": "string"}, "timings": _TIMINGS})
COMMIT = _with_example(
    _object({"version": _TEXT}, {"base_version": _or_null(_TEXT), "mode": _MODE}), version=_VERSION_NAME
)
COMMITTED = _object(_COMMITTED)
HOLD = _with_example(
    _object({"holder": _TEXT, "version": _TEXT}, {"seconds": {"type": "number", "minimum": 0}}),
    holder="evaluation",
    version=_VERSION_NAME,
    seconds=20,
)
HELD = _object({"version": _TEXT, "seconds": {"type": "number"}})
_ENGINE = _object(
    {"kind": {"type": "string"}, "capabilities": {"type": "array", "items": {"enum": list(CAPABILITIES)}}}
)
UPDATED = _object({**_COMMITTED, "engine": _ENGINE})
UPDATE = _with_example(
    {"anyOf": [_object({"manifest": _TEXT}, {"mode": _MODE}), _object(_OFFER, {"mode": _MODE})]}, manifest=_CHECKPOINT
)
UPDATE_FROM_DISK = _with_example(
    _object(
        {"model_path": _TEXT},
        {
            "mode": _MODE,
            "abort_all_requests": {**_FLAG, "description": "true is mode abort"},
            "flush_cache": {**_FLAG, "description": "false is mode in_place"},
            "weight_version": _or_null(_TEXT),
        },
    ),
    model_path=_CHECKPOINT,
)
UPDATED_FROM_DISK = _object(
    {"success": {"const": True}, "message": {"type": "string"}, **_COMMITTED, "engine": _ENGINE}
)
_REFUSED = _object({"version": _TEXT, "reason": _TEXT})
WEIGHTS = _object(
    {"current": _VERSION, "staged": _VERSION, "digest": _VERSION, "arriving": _VERSION, "refused": _or_null(_REFUSED)}
)
ABORT = _with_example({"anyOf": [_object({"rid": _TEXT}), _object({"abort_all": {"const": True}})]}, rid="1")
ABORTED = _object({"aborted": _COUNT})
PAUSE = _with_example(_object({}, {"mode": _MODE}), mode="in_place")
STATE = _object({"status": {"type": "string"}})
CONTINUE = _with_example(_object({}, {"torch_empty_cache": _FLAG}), torch_empty_cache=True)
TAGS = _with_example(_object({}, {"tags": _or_null({"type": "array", "items": _TEXT})}), tags=["weights"])
DONE = _object({"success": {"const": True}, "message": {"type": "string"}})
WEIGHT_VERSION = _object({"weight_version": _VERSION})
MODEL = _object(
    {
        "model_path": {"type": "string"},
        "is_generation": {"const": True},
        "weight_version": _VERSION,
        "vocab_size": _COUNT,
        "context_length": _COUNT,
        "eos_token_ids": {"type": "array", "items": _COUNT},
    }
)
SERVER = _object(
    {"engine": _ENGINE, "internal_state": {"type": "object"}, "version": {"type": "string"}, "tp_size": _COUNT}
)
LOADS = _object({"loads": {"type": "array", "items": {"type": "object"}}})
LOAD: Schema = {"type": "array", "items": {"type": "object"}}
