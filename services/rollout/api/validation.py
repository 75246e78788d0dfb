"""Turn a request body into a GenerateRequest that the engine can run unchanged, or raise one clear error.

The engine itself accepts ids outside the vocabulary, cuts prompts silently, and ignores some sampling parameters; such
requests are refused here. Fields of SGLang's clients that Volley does not implement pass if their value has no effect
(NEUTRAL, NEUTRAL_FIELDS); any other field is refused by name. This path uses no pydantic, which needs ten times as long
as numpy for a list of ids.
"""

from __future__ import annotations

import math
import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from services.rollout.engines.base import EngineInfo, GenerateRequest, SamplingParams, ScoreRequest
from shared.dialects.fields import is_one_of
from shared.errors import InputError

DEFAULT_NEW_TOKENS = 128
MAX_NEW_TOKENS = MAX_TOP_K = 1 << 30
MAX_TEMPERATURE, MIN_TOP_P = 1e3, 1e-6
MAX_SEED = (1 << 64) - 1
MAX_RID = 200
GREEDY_BELOW = 1e-4
MAX_STOPS = 1024
_MAX_NAME = 80
_FIELDS = frozenset(
    {
        "input_ids",
        "sampling_params",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "stream",
        "text",
        "return_routed_experts",
        "routed_experts_start_len",
    }
)
TEXTS = "return_text_in_logprobs"
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "modalities": (None, []),
    "token_ids_logprob": (None, []),
    TEXTS: (False, None),
    "return_hidden_states": (False, None),
    "log_metrics": (True, False, None),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None,),
    "priority": (None,),
    "background": (False, None),
    "no_logs": (True, False, None),
    "return_bytes": (False, None),
    "return_entropy": (False, None),
    "lora_id": (None,),
    "bootstrap_pair_key": (None,),
    "conversation_id": (None,),
    "extra_key": (None,),
    "custom_labels": (None,),
}
"""Fields of SGLang's request and of its router's, with the values that ask for nothing; others are refused."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "stop": (None, [], ""),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "skip_special_tokens": (True, False, None),
    "spaces_between_special_tokens": (True, False, None),
    "no_stop_trim": (True, False, None),
}
_SAMPLING = frozenset(
    {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "sampling_seed"}
)


def generate_request(body: Mapping[str, Any], info: EngineInfo) -> GenerateRequest:
    """Raises InputError naming the field and the value that is wrong."""
    ids = _checked_ids(body, info)
    _check_logprob_start(body.get("logprob_start_len"), len(ids))
    sampling = body.get("sampling_params")
    made = build(ids, sampling_params({} if sampling is None else sampling, info, len(ids)), body.get("rid"), info)
    return replace(made, routed_from=_routed_from(body, len(ids)))


def asks_to_score(body: Mapping[str, Any]) -> bool:
    """Return whether only log-probabilities of the prompt are asked for: `max_new_tokens` is 0, as SGLang's clients
    send it.
    """
    sampling = body.get("sampling_params")
    return isinstance(sampling, Mapping) and is_one_of(sampling.get("max_new_tokens"), (0,))


def score_request(body: Mapping[str, Any], info: EngineInfo) -> ScoreRequest:
    """Read a body that `asks_to_score`. Raises InputError naming the field and the value that is wrong."""
    ids = _checked_ids({name: value for name, value in body.items() if name != TEXTS}, info)
    sampling = sampling_params({**body["sampling_params"], "max_new_tokens": 1}, info, len(ids))
    if sampling.temperature not in (0.0, 1.0):
        raise InputError(
            f"temperature={sampling.temperature:g}: the tokens of a prompt are scored at temperature 1", "leave it out"
        )
    if body.get("return_logprob") is not True:
        raise InputError("max_new_tokens=0 without return_logprob asks for nothing", "send return_logprob=true")
    if len(ids) > room(info):
        raise InputError(f"{len(ids)} tokens exceed the context: at most {room(info)} can be scored")
    if _routed_from(body, len(ids)) is not None:
        raise InputError("experts are told of what is sampled, and max_new_tokens is 0", "leave them out")
    start = _integer("logprob_start_len", body.get("logprob_start_len"), 0, 0, len(ids) - 1)
    return ScoreRequest(ids, start, _boolean(TEXTS, body.get(TEXTS)))


def _checked_ids(body: Mapping[str, Any], info: EngineInfo) -> np.ndarray:
    """Return the prompt, int32[n], of a body whose other fields are all supported. Raises InputError."""
    for name in body.keys() - _FIELDS:
        if name not in NEUTRAL_FIELDS:
            raise InputError(f"unknown field {str(name)[:_MAX_NAME]}", f"known: {', '.join(sorted(_FIELDS))}")
        if not is_one_of(body[name], NEUTRAL_FIELDS[name]):
            raise InputError(f"{name}={_short(body[name])} is not supported", "leave it out")
    if not is_one_of(body.get("stream"), (False, None)):
        raise InputError(f"stream={_short(body['stream'])} is not supported", "leave it out: the answer comes whole")
    if not is_one_of(body.get("top_logprobs_num"), (0, None)):
        raise InputError("top_logprobs_num is not supported", "there are log-probabilities of the tokens alone")
    rid = body.get("rid")
    if rid is not None and not (isinstance(rid, str) and len(rid) <= MAX_RID):
        raise InputError(f"rid must be a string of up to {MAX_RID} characters, not {_short(rid)}")
    return _ids(body.get("input_ids"), info.vocab_size)


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Return `return_logprob`, by default true, unlike SGLang's. Raises InputError."""
    return True if body.get("return_logprob") is None else _boolean("return_logprob", body["return_logprob"])


def _check_logprob_start(start: Any, n_prompt: int) -> None:
    """Check SGLang's `logprob_start_len`, the first position with a log-probability; -1 is the prompt's end.

    Raises InputError.
    """
    if start is None:
        return
    if type(start) is not int or not -1 <= start <= n_prompt:
        raise InputError(
            f"logprob_start_len must be -1 or a position of the prompt up to {n_prompt}, not {_short(start)}"
        )
    if start not in (-1, n_prompt):
        raise InputError(
            f"logprob_start_len={start} asks for log-probabilities of the prompt, which come without sampled tokens",
            f"send max_new_tokens=0 with it, or leave it out (-1 and the prompt's length, {n_prompt}, ask for none)",
        )


def _routed_from(body: Mapping[str, Any], n_prompt: int) -> int | None:
    """Return the first position of the prompt for which experts are wanted; None for none. Raises InputError."""
    start = _integer("routed_experts_start_len", body.get("routed_experts_start_len"), 0, 0, n_prompt)
    return start if _boolean("return_routed_experts", body.get("return_routed_experts")) else None


def build(ids: np.ndarray, sampling: SamplingParams, rid: str | None, info: EngineInfo) -> GenerateRequest:
    """Build the request after checking lengths. `ids`: int32[n], within the vocabulary. Raises InputError."""
    limit = room(info)
    if len(ids) + sampling.max_new_tokens > limit:
        raise InputError(
            f"{len(ids)} prompt tokens and max_new_tokens {sampling.max_new_tokens} exceed the context: "
            f"together they may be at most {limit}",
            "shorten the prompt, lower max_new_tokens, or raise rollout.engine.context_length",
        )
    return GenerateRequest(rid or uuid.uuid4().hex, ids, sampling)


def room(info: EngineInfo) -> int:
    """Return the maximum number of tokens of prompt and output together."""
    return min(info.context_length, info.max_total_tokens) - 1


def check_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the ids as int32[n]. Raises InputError for an empty array, or naming an id outside the vocabulary."""
    if not ids.size:
        raise InputError("input_ids is empty", "send at least one token")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise InputError(f"input_ids[{at}] is {int(ids[at])}, outside the vocabulary of {vocab_size} tokens")
    return ids.astype(np.int32, copy=False)


def sampling_params(raw: Any, info: EngineInfo, n_prompt: int) -> SamplingParams:
    """Read SGLang's `sampling_params`; refuse those that the engine would ignore. Raises InputError."""
    if not isinstance(raw, Mapping):
        raise InputError(f"sampling_params must be an object, not {type(raw).__name__}")
    for name in raw.keys() - _SAMPLING:
        if name not in NEUTRAL:
            raise InputError(
                f"unknown sampling parameter {str(name)[:_MAX_NAME]}", f"known: {', '.join(sorted(_SAMPLING))}"
            )
        if not is_one_of(raw[name], NEUTRAL[name]):
            raise InputError(f"sampling parameter {name}={_short(raw[name])} is not supported", "leave it out")
    seed = raw.get("sampling_seed")
    temperature = _number("temperature", raw.get("temperature"), 1.0, 0.0, MAX_TEMPERATURE)
    default_new = max(1, min(DEFAULT_NEW_TOKENS, room(info) - n_prompt))
    return SamplingParams(
        max_new_tokens=_integer("max_new_tokens", raw.get("max_new_tokens"), default_new, 1, MAX_NEW_TOKENS),
        temperature=computable(temperature),
        top_p=_number("top_p", raw.get("top_p"), 1.0, MIN_TOP_P, 1.0),
        top_k=_top_k(raw.get("top_k")),
        stop_token_ids=check_stops(raw.get("stop_token_ids"), info.vocab_size),
        ignore_eos=_boolean("ignore_eos", raw.get("ignore_eos")),
        sampling_seed=None if seed is None else _integer("sampling_seed", seed, 0, 0, MAX_SEED),
    )


def computable(temperature: float) -> float:
    """Return the temperature, or 0 (greedy) if logits divided by it might not be finite."""
    return temperature if temperature >= GREEDY_BELOW else 0.0


def _ids(value: Any, vocab_size: int) -> np.ndarray:
    if value is None:
        raise InputError("input_ids is missing", "send the prompt as a list of token ids")
    if isinstance(value, list):
        if any(type(token) is not int for token in value):
            raise InputError(
                "input_ids must be a list of integers", "one request is one prompt; send several requests for a batch"
            )
        try:
            value = np.array(value, np.int64)
        except OverflowError as error:
            raise InputError("input_ids holds an integer of more than 64 bits") from error
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise InputError("input_ids must be a list of integers or an integer array")
    return check_ids(value, vocab_size)


def check_stops(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Read `stop_token_ids`; None is an empty list. Raises InputError."""
    if value is None:
        return ()
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in items):
        raise InputError(f"stop_token_ids must be a list of ids below {vocab_size}, not {_short(value)}")
    if len(items) > MAX_STOPS:
        raise InputError(f"stop_token_ids holds {len(items)} ids, at most {MAX_STOPS} are taken")
    return tuple(items)


def _top_k(value: Any) -> int:
    top_k = _integer("top_k", value, -1, -1, MAX_TOP_K)
    if top_k == 0:
        raise InputError("top_k=0 keeps no token", "use -1 for all")
    return top_k


def _short(value: Any) -> str:
    """Return a shortened `repr`, so that errors do not repeat large bodies."""
    return reprlib.repr(value)


def _boolean(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {_short(value)}")
    return bool(value)


def _integer(name: str, value: Any, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{name} must be an integer from {low} to {high}, not {_short(value)}")
    return value


def _number(name: str, value: Any, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise InputError(f"{name} must be a number from {low:g} to {high:g}, not {_short(value)}")
    return float(value)
