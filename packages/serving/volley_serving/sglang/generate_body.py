"""Read the body of SGLang's /generate: one prompt or a batch, as text or ids.

A field is honoured (FIELDS), accepted because its value asks for nothing (NEUTRAL_FIELDS, LABELS), or refused by name.
In a batch the fields of PER_PROMPT may be lists with one value for each prompt.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.rollout.api import generate
from services.rollout.api.generate import read_rid, read_tokens, wants_logprobs
from services.rollout.api.validation import boolean, check_count, integer, short
from services.rollout.engines.base import MAX_TOP_LOGPROBS, EngineInfo, GenerateRequest
from shared.errors import InputError
from volley_serving.sglang import sampling
from volley_serving.sglang.names import check_names

MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
MAX_INTERVAL = 1 << 20
_MAX_SEED = 1 << 64
TEXTS = "return_text_in_logprobs"
FIELDS = generate.FIELDS | {"text", "stream", "top_logprobs_num", TEXTS, "return_prompt_token_ids"}
"""Fields that are honoured."""
LABELS = frozenset({"model", "session_id", "conversation_id", "routing_key", "external_trace_header", "received_time"})
"""Fields of routers and clients that describe a request: any value is accepted, and changes nothing."""
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "modalities": (None, []),
    "mm_hashes": (None, []),
    "mm_content_hashes": (None, []),
    "use_audio_in_video": (False, None),
    "video_config": (None,),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (False, None),
    "return_sampling_mask": (False, None),
    "sampling_logprobs_mode": (None,),
    "return_flat_raw_top_logprobs": (False, None),
    "return_flat_raw_output_top_logprobs": (False, None),
    "return_flat_raw_top_logprobs_b64": (False, None),
    "return_indexer_topk": (False, None),
    "log_metrics": (True, False, None),
    "no_logs": (True, False, None),
    "lora_path": (None,),
    "lora_id": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "positional_embed_overrides": (None,),
    "watermark": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "bootstrap_pair_key": (None,),
    "decode_tp_size": (None,),
    "routed_dp_rank": (0, None),
    "data_parallel_rank": (0, None),
    "disagg_prefill_dp_rank": (None,),
    "background": (False, None),
    "require_reasoning": (False, None),
    "max_thinking_tokens": (None,),
    "priority": (0, None),
    "extra_key": (None, ""),
    "cache_salt": (None, ""),
    "kv_hints": (None,),
    "custom_labels": (None, {}),
    "return_bytes": (False, None),
    "return_entropy": (False, None),
    "multi_item_delimiter_indices": (None,),
    "token_indices_to_pool": (None,),
    "mm_processor_kwargs": (None, {}),
    "images_config": (None, {}),
    "max_dynamic_patch": (None,),
    "min_dynamic_patch": (None,),
}
"""Other fields of SGLang's request, with the values that ask for nothing; any other value is refused."""
PER_PROMPT = frozenset(
    {
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "image_data",
        "video_data",
        "audio_data",
        "return_hidden_states",
        "lora_path",
        "lora_id",
        "custom_logit_processor",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "extra_key",
        "cache_salt",
    }
)
_NAMES = FIELDS | LABELS

type Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompt:
    """One requested answer.

    Attributes:
        ids: prompt, int32[n].
        request: None if nothing is sampled.
        scored_from: first position of the prompt whose token is listed with its log-probability; None for none.
        logprobs, texts: list the log-probabilities of sampled tokens, with the tokens' texts.
        echoes_ids: repeat the prompt's ids.
        stop: strings that end the answer.
        skips_special, keeps_stop: leave special tokens out of the text; keep the stop string or token in it.
        interval: tokens from one event of a stream to the next.
    """

    ids: np.ndarray
    request: GenerateRequest | None
    scored_from: int | None
    top_logprobs: int = 0
    logprobs: bool = True
    texts: bool = False
    echoes_ids: bool = False
    stop: tuple[str, ...] = ()
    skips_special: bool = True
    keeps_stop: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class GenerateBody:
    """All answers of a request, those of each prompt in a row. `is_batch`: the answer is a list."""

    prompts: tuple[AskedPrompt, ...]
    is_batch: bool
    stream: bool


def read(body: Mapping[str, Any], info: EngineInfo, encode: Encode | None) -> GenerateBody:
    """Read a body; `encode` tokenizes, None for a server without a tokenizer. Raises InputError naming the field."""
    check_names(body, _NAMES, {**NEUTRAL_FIELDS, **_lists(body)}, "")
    prompts, listed = _prompts(body, info, encode)
    n = _samples(body.get("sampling_params"))
    if n > 1:
        check_count(len(prompts) * n, info)
    single_body = {name: value for name, value in body.items() if name not in ("text", "rid")}
    asked = list[AskedPrompt]()
    rids = _rids(body.get("rid"), len(prompts), n, is_batch=listed or n > 1)
    for i, ids in enumerate(prompts):
        given = _of_prompt(single_body, i, len(prompts)) if listed else single_body
        one = read_prompt({**given, "input_ids": ids}, info)
        if one.stop and encode is None:
            raise InputError("stop: this server has no tokenizer", "send stop_token_ids")
        asked += [_sample(one, rids[i * n + k], k) for k in range(n)]
    return GenerateBody(tuple(asked), listed or n > 1, boolean("stream", body.get("stream")))


def read_prompt(body: Mapping[str, Any], info: EngineInfo) -> AskedPrompt:
    """Read the body of one prompt of ids. Raises InputError naming the field and the value that is wrong."""
    check_names(body, _NAMES, NEUTRAL_FIELDS, "")
    top, texts = _top_logprobs(body), boolean(TEXTS, body.get(TEXTS))
    echoes = boolean("return_prompt_token_ids", body.get("return_prompt_token_ids"))
    asked = read_tokens(body, info, sampling.read)
    if asked.request is None:
        return AskedPrompt(asked.ids, None, asked.scored_from, top, texts=texts, echoes_ids=echoes)
    raw: Mapping[str, Any] = body.get("sampling_params") or {}
    start = _scored_from(body.get("logprob_start_len"), len(asked.ids))
    skips = raw.get("skip_special_tokens")
    return AskedPrompt(
        asked.ids,
        replace(asked.request, top_logprobs=top),
        start if asked.logprobs else None,
        top,
        asked.logprobs,
        texts,
        echoes,
        _stops(raw.get("stop")),
        skips_special=skips is None or boolean("skip_special_tokens", skips),
        keeps_stop=boolean("no_stop_trim", raw.get("no_stop_trim")),
        interval=integer("stream_interval", raw.get("stream_interval"), 1, 1, MAX_INTERVAL),
    )


def _prompts(body: Mapping[str, Any], info: EngineInfo, encode: Encode | None) -> tuple[list[Any], bool]:
    """Return the prompts' ids, and whether they came as a list of prompts. Raises InputError."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is None:
        if not isinstance(ids, list) or not ids or not isinstance(ids[0], list):
            return [ids], False
        if any(not isinstance(one, list) for one in ids):
            raise InputError("input_ids must be a list of integers, or a list of such lists for a batch")
        return ids, True
    if ids is not None:
        raise InputError("text and input_ids are both given", "send one of them")
    if encode is None:
        raise InputError("this server has no tokenizer", "send input_ids")
    listed = isinstance(text, list)
    texts: list[Any] = text if listed else [text]
    if not texts or any(not isinstance(one, str) or not one for one in texts):
        raise InputError(f"text must be a text, or a list of texts for a batch, none of them empty, not {short(text)}")
    return [encode(one) for one in texts], listed


def _lists(body: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return neutral fields with a list of values for a batch; `read_prompt` checks each element."""
    return {name: (body[name],) for name in PER_PROMPT & NEUTRAL_FIELDS.keys() if isinstance(body.get(name), list)}


def _of_prompt(body: Mapping[str, Any], i: int, n_prompts: int) -> dict[str, Any]:
    """Return the fields of prompt `i` of a batch. Raises InputError for a list of another length."""
    found = dict(body)
    for name in PER_PROMPT & body.keys():
        value = body[name]
        if isinstance(value, list) and value:
            if len(value) != n_prompts:
                raise InputError(f"{name} has {len(value)} values, but there are {n_prompts} prompts")
            found[name] = value[i]
    return found


def _samples(sampling: Any) -> int:
    """Return the number of answers to each prompt. Raises InputError."""
    given = sampling if isinstance(sampling, list) else [sampling]
    counts = {integer("n", one.get("n"), 1, 1, MAX_SAMPLES) for one in given if isinstance(one, Mapping)}
    if len(counts) > 1:
        raise InputError("n differs between the prompts of a batch", "send the same n for all")
    return counts.pop() if counts else 1


def _rids(rid: Any, n_prompts: int, n: int, *, is_batch: bool) -> list[str | None]:
    """Return an identifier for each answer: of a batch, the given one with the answer's number. Raises InputError."""
    if isinstance(rid, list):
        if len(rid) != n_prompts or len({read_rid(one) for one in rid}) != n_prompts or not is_batch:
            raise InputError(f"rid must hold a different text for each of {n_prompts} prompts, not {short(rid)}")
        return [one if n == 1 else f"{one}_{k}" for one in rid for k in range(n)]
    base = read_rid(rid)
    return [base if base is None or not is_batch else f"{base}_{i}" for i in range(n_prompts * n)]


def _sample(asked: AskedPrompt, rid: str | None, k: int) -> AskedPrompt:
    """Return sample `k` of a prompt, with a seed of its own."""
    if asked.request is None:
        return asked
    sampling = asked.request.sampling
    seed = None if sampling.sampling_seed is None else (sampling.sampling_seed + k) % _MAX_SEED
    request = replace(
        asked.request, rid=rid or uuid.uuid4().hex, sampling=replace(sampling, sampling_seed=seed) if k else sampling
    )
    return replace(asked, request=request)


def _scored_from(start: Any, n_prompt: int) -> int | None:
    """Read `logprob_start_len`, the first position to list; -1 and the prompt's end list none. Raises InputError."""
    if start is None or start == -1:
        return None
    if type(start) is not int or not 0 <= start <= n_prompt:
        raise InputError(
            f"logprob_start_len must be -1 or a position of the prompt up to {n_prompt}, not {short(start)}"
        )
    return start if start < n_prompt else None


def _top_logprobs(body: Mapping[str, Any]) -> int:
    top = integer("top_logprobs_num", body.get("top_logprobs_num"), 0, 0, MAX_TOP_LOGPROBS)
    if top and not wants_logprobs(body):
        raise InputError(f"top_logprobs_num={top} needs return_logprob", "send return_logprob=true")
    return top


def _stops(stop: Any) -> tuple[str, ...]:
    """Read stop strings; empty ones are ignored. Raises InputError."""
    stops: Any = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or any(not isinstance(one, str) for one in stops):
        raise InputError(f"stop must be a text or a list of texts, not {short(stop)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise InputError(f"stop has {len(stops)} texts, but at most {MAX_STOP_STRINGS} are allowed")
    return tuple(one for one in stops if one)
