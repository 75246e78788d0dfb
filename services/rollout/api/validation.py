"""Check values of a request, so that the engine can run it unchanged, or raise one clear error.

The engine itself accepts ids outside the vocabulary, cuts prompts silently, and ignores some sampling parameters; such
requests are refused here. Parameters of SGLang's clients that Volley does not implement pass if their value has no
effect (NEUTRAL); any other is refused by name. This path uses no pydantic, which needs ten times as long as numpy for a
list of ids.
"""

from __future__ import annotations

import math
import reprlib
import uuid
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from services.rollout.engines.base import EngineInfo, GenerateRequest, Grammar, GrammarKind, SamplingParams
from shared.bounds import is_one_of
from shared.errors import ContextExceeded, InputError

CROWD = 16
"""Requests in the service, at most, as a multiple of those that run at once; the others wait in the engine's queue."""
DEFAULT_NEW_TOKENS = 128
MAX_NEW_TOKENS = MAX_TOP_K = 1 << 30
MAX_TEMPERATURE, MIN_TOP_P = 1e3, 1e-6
MAX_SEED = (1 << 64) - 1
MAX_RID = 200
GREEDY_BELOW = 1e-4
MAX_STOPS = 1024
_MAX_NAME = 80
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "stop_regex": (None, [], ""),
    "spaces_between_special_tokens": (True, False, None),
    "custom_params": (None, {}),
    "beam_width": (1, None),
    "watermark": (None,),
}
"""Sampling parameters of SGLang, with the values that ask for nothing; others are refused."""
SAMPLING = frozenset(
    {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "sampling_seed",
        "n",
        "skip_special_tokens",
        "no_stop_trim",
        "stream_interval",
    }
)
"""Sampling parameters that are honoured."""
OPTIONAL: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "min_p": ("min_p", (0, None)),
    "min_new_tokens": ("min_new_tokens", (0, None)),
    "frequency_penalty": ("frequency_penalty", (0, None)),
    "presence_penalty": ("presence_penalty", (0, None)),
    "logit_bias": ("logit_bias", (None, {})),
    "json_schema": ("grammar", (None, "")),
    "regex": ("grammar", (None, "")),
    "lark": ("grammar", (None, "")),
}
"""Sampling parameters that are honoured if the engine has an option (`EngineInfo.options`): the option, and the values
that ask for nothing.
"""
MAX_PENALTY, MAX_BIAS, MAX_BIASES = 2.0, 100.0, 1024


def build(ids: np.ndarray, sampling: SamplingParams, rid: str | None, info: EngineInfo) -> GenerateRequest:
    """Build the request after checking lengths. `ids`: int32[n], within the vocabulary. Raises ContextExceeded."""
    limit = room(info)
    if len(ids) + sampling.max_new_tokens > limit:
        raise ContextExceeded.of(limit, len(ids), sampling.max_new_tokens)
    return GenerateRequest(rid or uuid.uuid4().hex, ids, sampling)


def room(info: EngineInfo) -> int:
    """Return the maximum number of tokens of prompt and output together."""
    return min(info.context_length, info.max_total_tokens) - 1


def max_requests(info: EngineInfo) -> int:
    """Return the maximum number of requests that the service accepts."""
    return CROWD * info.max_running_requests


def check_count(n: int, info: EngineInfo) -> None:
    """Raise InputError for more samples in one body than the service takes, before anything is built for each."""
    if n > max_requests(info):
        raise InputError(
            f"{n} samples are requested, but this server runs at most {max_requests(info)} requests at once"
        )


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
    missing = {name: neutral for name, (option, neutral) in OPTIONAL.items() if option not in info.options}
    check_names(raw, SAMPLING | (OPTIONAL.keys() - missing), {**NEUTRAL, **missing}, "sampling parameter ")
    seed = raw.get("sampling_seed")
    temperature = number("temperature", raw.get("temperature"), 1.0, 0.0, MAX_TEMPERATURE)
    fitting = max(1, room(info) - n_prompt)
    default_new = fitting if "max_new_tokens" in raw else min(DEFAULT_NEW_TOKENS, fitting)  # null: as many as fit
    return SamplingParams(
        max_new_tokens=integer("max_new_tokens", raw.get("max_new_tokens"), default_new, 1, MAX_NEW_TOKENS),
        temperature=computable(temperature),
        top_p=number("top_p", raw.get("top_p"), 1.0, MIN_TOP_P, 1.0),
        top_k=_top_k(raw.get("top_k")),
        stop_token_ids=check_stops(raw.get("stop_token_ids"), info.vocab_size),
        ignore_eos=boolean("ignore_eos", raw.get("ignore_eos")),
        sampling_seed=None if seed is None else integer("sampling_seed", seed, 0, 0, MAX_SEED),
        min_p=number("min_p", raw.get("min_p"), 0.0, 0.0, 1.0),
        min_new_tokens=integer("min_new_tokens", raw.get("min_new_tokens"), 0, 0, MAX_NEW_TOKENS),
        frequency_penalty=number("frequency_penalty", raw.get("frequency_penalty"), 0.0, -MAX_PENALTY, MAX_PENALTY),
        presence_penalty=number("presence_penalty", raw.get("presence_penalty"), 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_biases(raw.get("logit_bias"), info.vocab_size),
        grammar=_grammar(raw),
    )


def _biases(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`, an object from token ids to numbers."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise InputError(f"logit_bias must be an object of at most {MAX_BIASES} token ids, not {short(value)}")
    for token in value:
        if not (str(token).isascii() and str(token).isdigit() and int(token) < vocab_size):
            raise InputError(f"logit_bias has {short(token)}, which is not a token id below {vocab_size}")
    return tuple(
        (int(token), number(f"logit_bias[{token}]", bias, 0.0, -MAX_BIAS, MAX_BIAS)) for token, bias in value.items()
    )


def _grammar(raw: Mapping[str, Any]) -> Grammar | None:
    """Read `json_schema`, `regex` or `lark`, of which a request may have one; all are texts."""
    kinds: tuple[GrammarKind, ...] = ("json_schema", "regex", "lark")
    given = [kind for kind in kinds if not is_one_of(raw.get(kind), (None, ""))]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} are both given", "send one of them")
    for kind in given:
        if not isinstance(raw[kind], str):
            raise InputError(f"{kind} must be a text, not {short(raw[kind])}", "send a JSON schema as text, too")
        return Grammar(kind, raw[kind])
    return None


def check_names(raw: Mapping[str, Any], known: Set[str], neutral: Mapping[str, tuple[Any, ...]], what: str) -> None:
    """Refuse names that are not `known`, unless the value is a neutral one. Raises InputError."""
    for name in raw.keys() - known:
        if name not in neutral:
            raise InputError(f"unknown {what or 'field '}{str(name)[:_MAX_NAME]}", f"known: {', '.join(sorted(known))}")
        if not is_one_of(raw[name], neutral[name]):
            raise InputError(f"{what}{name}={short(raw[name])} is not supported", "remove it from the request")


def computable(temperature: float) -> float:
    """Return the temperature, or 0 (greedy) if logits divided by it might not be finite."""
    return temperature if temperature >= GREEDY_BELOW else 0.0


def prompt_ids(value: Any, vocab_size: int) -> np.ndarray:
    """Read a prompt's ids, int32[n]. Raises InputError."""
    if value is None:
        raise InputError("input_ids is missing", "send the prompt as a list of token ids")
    if isinstance(value, list):
        if any(type(token) is not int for token in value):
            raise InputError("input_ids must be a list of integers, or a list of such lists for a batch")
        try:
            value = np.array(value, np.int64)
        except OverflowError as error:
            raise InputError("input_ids holds an integer of more than 64 bits") from error
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.ndim != 1:
        raise InputError("input_ids must be a list of integers or an integer array")
    return check_ids(value, vocab_size)


def check_stops(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Read `stop_token_ids`; None is an empty list. Raises InputError."""
    if value is None:
        return ()
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in items):
        raise InputError(f"stop_token_ids must be a list of ids below {vocab_size}, not {short(value)}")
    if len(items) > MAX_STOPS:
        raise InputError(f"stop_token_ids has {len(items)} ids, but at most {MAX_STOPS} are allowed")
    return tuple(items)


def _top_k(value: Any) -> int:
    top_k = integer("top_k", value, -1, -1, MAX_TOP_K)
    if top_k == 0:
        raise InputError("top_k=0 would exclude every token", "use -1 for all")
    return top_k


def short(value: Any) -> str:
    """Return a shortened `repr`, so that errors do not repeat large bodies."""
    return reprlib.repr(value)


def boolean(name: str, value: Any) -> bool:
    """Read a flag; null is false. Raises InputError."""
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {short(value)}")
    return bool(value)


def integer(name: str, value: Any, default: int, low: int, high: int) -> int:
    """Read an integer within limits; null is the default. Raises InputError."""
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{name} must be an integer from {low} to {high}, not {short(value)}")
    return value


def number(name: str, value: Any, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise InputError(f"{name} must be a number from {low:g} to {high:g}, not {short(value)}")
    return float(value)
