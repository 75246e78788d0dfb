"""JSON schemas of the routes' bodies and answers, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

type Schema = Mapping[str, Any]
_TEXT, _WHOLE, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required)}


OBJECT = _object()
_NUMBER = {"type": "number"}
_IDS = {"type": "array", "items": _WHOLE}
_INPUT = _object(("chunks",), chunks={"type": "array", "items": _object(("tokens",), type=_TEXT, tokens=_IDS)})
_TENSOR = _object(("data",), data={"type": "array", "items": _NUMBER}, dtype={"enum": ["float32", "int64"]}, shape=_IDS)
_DATUM = _object(
    ("model_input", "loss_fn_inputs"),
    model_input=_INPUT,
    loss_fn_inputs={"type": "object", "additionalProperties": _TENSOR},
)
CAPABILITIES = _object(("supported_models",), supported_models={"type": "array", "items": OBJECT})
SESSION = _object(user_metadata=OBJECT, display_name=_TEXT)
OF_SESSION = _object(("session_id",), session_id=_TEXT)
FINISH = _object(reason=_object(type=_TEXT))
OF_MODEL = _object(("model_id",), model_id=_TEXT)
FUTURE = _object(("request_id",), request_id=_TEXT, model_id=_TEXT)
_LORA = _object(("rank",), rank=_WHOLE, seed=_WHOLE, train_attn=_FLAG, train_mlp=_FLAG, train_unembed=_FLAG)
MODEL = _object(
    ("session_id", "model_seq_id", "base_model"),
    session_id=_TEXT,
    model_seq_id=_WHOLE,
    base_model=_TEXT,
    lora_config=_LORA,
)
_DATA = _object(("data", "loss_fn"), data={"type": "array", "items": _DATUM}, loss_fn=_TEXT, loss_fn_config=OBJECT)
PASS = _object(
    ("model_id", "seq_id", "forward_backward_input"), model_id=_TEXT, seq_id=_WHOLE, forward_backward_input=_DATA
)
_ADAM = _object(
    learning_rate=_NUMBER, beta1=_NUMBER, beta2=_NUMBER, eps=_NUMBER, weight_decay=_NUMBER, grad_clip_norm=_NUMBER
)
STEP = _object(("model_id", "seq_id", "adam_params"), model_id=_TEXT, seq_id=_WHOLE, adam_params=_ADAM)
SAVE = _object(
    ("model_id", "seq_id"),
    model_id=_TEXT,
    seq_id=_WHOLE,
    path=_TEXT,
    ttl_seconds=_WHOLE,
    sampling_session_seq_id=_WHOLE,
)
LOAD = _object(
    ("path", "optimizer"),
    path=_TEXT,
    optimizer=_FLAG,
    model_id=_TEXT,
    seq_id=_WHOLE,
    session_id=_TEXT,
    model_seq_id=_WHOLE,
)
SAMPLER = _object(
    ("session_id", "sampling_session_seq_id"),
    session_id=_TEXT,
    sampling_session_seq_id=_WHOLE,
    base_model=_TEXT,
    model_path=_TEXT,
)
JOIN = _object(("sampling_session_id",), sampling_session_id=_TEXT)
_SAMPLING = _object(max_tokens=_WHOLE, temperature=_NUMBER, top_p=_NUMBER, top_k=_WHOLE, seed=_WHOLE)
SAMPLE = _object(
    ("prompt", "sampling_params"),
    prompt=_INPUT,
    sampling_params=_SAMPLING,
    num_samples=_WHOLE,
    sampling_session_id=_TEXT,
    seq_id=_WHOLE,
    prompt_logprobs=_FLAG,
)
RETRIEVE = _object(("request_id",), request_id=_TEXT)
