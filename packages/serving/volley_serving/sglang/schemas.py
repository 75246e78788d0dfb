"""JSON schemas of SGLang's routes, for the OpenAPI page of the rollout server."""

from __future__ import annotations

from services.rollout.api import schemas, validation
from services.rollout.api.schemas import COUNT, FLAG, TEXT, VERSION, Schema, number, object_of, or_null, with_example
from services.rollout.engines.base import MAX_TOP_LOGPROBS
from volley_serving.sglang import generate_body, sampling

_STOP: Schema = or_null({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 64}]})
_SAMPLING = object_of(
    {},
    {
        **schemas.SAMPLING,
        "stop": _STOP,
        "n": number(1, generate_body.MAX_SAMPLES, "integer"),
        "skip_special_tokens": FLAG,
        "no_stop_trim": FLAG,
        "stream_interval": number(1, generate_body.MAX_INTERVAL, "integer"),
        "min_p": number(0, 1),
        "min_new_tokens": number(0, validation.MAX_NEW_TOKENS, "integer"),
        "frequency_penalty": number(-sampling.MAX_PENALTY, sampling.MAX_PENALTY),
        "presence_penalty": number(-sampling.MAX_PENALTY, sampling.MAX_PENALTY),
        "logit_bias": or_null({"type": "object", "maxProperties": sampling.MAX_BIASES}),
        "json_schema": or_null({"type": "string"}),
        "regex": or_null({"type": "string"}),
        "lark": or_null({"type": "string"}),
        **{name: {"enum": list(values)} for name, values in sampling.NEUTRAL.items()},
    },
    closed=True,
)
_GENERATE: Schema = object_of(
    {},
    {
        **schemas.GENERATE,
        "text": TEXT,
        "sampling_params": or_null(_SAMPLING),
        "stream": FLAG,
        "top_logprobs_num": number(0, MAX_TOP_LOGPROBS, "integer"),
        generate_body.TEXTS: FLAG,
        "return_prompt_token_ids": FLAG,
        **{name: {} for name in sorted(generate_body.LABELS)},
        **{name: {"enum": list(values)} for name, values in generate_body.NEUTRAL_FIELDS.items()},
    },
    closed=True,
) | {
    "oneOf": [{"required": ["input_ids"]}, {"required": ["text"]}],
    "description": "As msgpack, input_ids may be an array. For a batch, text and input_ids are lists of prompts, other "
    "fields may be lists with a value for each, and the answer is a list.",
}
GENERATE = with_example(_GENERATE, input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 8, "temperature": 1.0})
_LIST: Schema = {"type": "array"}
_META = object_of(schemas.META, {**schemas.META_LISTS, "output_top_logprobs": _LIST, "input_top_logprobs": _LIST})
_GENERATED = object_of(
    {"output_ids": schemas.OUTPUT_IDS, "meta_info": _META},
    {"text": {"type": "string"}, "prompt_token_ids": {"type": "array", "items": COUNT}},
)
GENERATED: Schema = {"anyOf": [_GENERATED, {"type": "array", "items": _GENERATED, "description": "of a batch"}]}

UPDATE_FROM_DISK = with_example(
    object_of(
        {"model_path": TEXT},
        {
            "mode": schemas.MODE,
            "abort_all_requests": {**FLAG, "description": "true is mode abort"},
            "flush_cache": {**FLAG, "description": "false is mode in_place"},
            "weight_version": or_null(TEXT),
        },
    ),
    model_path=schemas.CHECKPOINT,
)
UPDATED_FROM_DISK = object_of(
    {
        "success": {"const": True},
        "message": {"type": "string"},
        **schemas.COMMITTED_FIELDS,
        "engine": schemas.ENGINE,
    }
)
PAUSE = with_example(object_of({}, {"mode": schemas.MODE}), mode="in_place")
STATE = object_of({"status": {"type": "string"}})
CONTINUE = with_example(object_of({}, {"torch_empty_cache": FLAG}), torch_empty_cache=True)
TAGS = with_example(object_of({}, {"tags": or_null({"type": "array", "items": TEXT})}), tags=["weights"])
DONE = object_of({"success": {"const": True}, "message": {"type": "string"}})
WEIGHT_VERSION = object_of({"weight_version": VERSION})
MODEL = object_of(
    {
        "model_path": {"type": "string"},
        "is_generation": {"const": True},
        "weight_version": VERSION,
        "vocab_size": COUNT,
        "context_length": COUNT,
        "eos_token_ids": {"type": "array", "items": COUNT},
    }
)
LOADS = object_of({"loads": {"type": "array", "items": {"type": "object"}}})
LOAD: Schema = {"type": "array", "items": {"type": "object"}}
