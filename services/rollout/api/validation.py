"""Check values of a request, so that the engine can run it unchanged, or raise one clear error.

The engine itself accepts ids outside the vocabulary, cuts prompts silently, and ignores some sampling parameters; such
requests are refused here. This path uses no pydantic, which needs ten times as long as numpy for a list of ids.
"""

from __future__ import annotations

import math
import reprlib
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.rollout.engines.base import EngineInfo, GenerateRequest, SamplingParams
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
SAMPLING = frozenset(
    {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "sampling_seed"}
)
"""Sampling parameters that `sampling_params` reads."""


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
    """Read the parameters SAMPLING of SGLang's `sampling_params`, for a prompt of so many tokens. Raises InputError."""
    if not isinstance(raw, Mapping):
        raise InputError(f"sampling_params must be an object, not {type(raw).__name__}")
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
    )


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
