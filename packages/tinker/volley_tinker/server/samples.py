"""Tinker's sampling messages: a request read into calls of SGLang's /generate, the answers written as one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import InputError, MalformedAnswer
from volley_tinker.server import protobuf as pb
from volley_tinker.server import specs
from volley_tinker.server.messages import prompt_ids

MOST_SAMPLES = 128
_MOST_TOP = 20
_LENGTH = 1
_ABSENT = -99999.0  # the SDK reads it, with token 0, as nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "target_prompt_logprobs": (None,),
    "prompt_alt_tokens_k": (0, None),
    "record_stability_info": (False, None),
}


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """`num_samples` continuations of a prompt, with log-probabilities of its last `scored` tokens (0: none)."""

    prompt: np.ndarray
    num_samples: int
    sampling: Mapping[str, Any]
    seed: int | None
    scored: int
    top_prompt: int
    top_sample: int

    def call(self, i: int) -> dict[str, Any]:
        """Return the body of sample `i`; only the first scores the prompt."""
        sampling = dict(self.sampling)
        if self.seed is not None:
            sampling["sampling_seed"] = (self.seed + i) % 2**63
        body: dict[str, Any] = {"input_ids": self.prompt, "sampling_params": sampling}
        top = max(self.top_prompt, self.top_sample) if i == 0 else self.top_sample
        if top:
            body["top_logprobs_num"] = top
        if i == 0 and self.scored:
            body["logprob_start_len"] = 0
        return body


def sample_request(body: Mapping[str, Any], context: int) -> SampleRequest:
    """Read an asample; `context` is the most tokens of prompt and answer. Raises InputError."""
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise InputError(f"{name} is not supported", "remove it from the request")
    prompt = prompt_ids(body.get("prompt"))
    if not 0 < len(prompt) < context:
        raise InputError(f"the prompt has {len(prompt)} tokens, 1 to {context - 1} are taken")
    last = body.get("prompt_logprobs_last_n")
    scored = len(prompt) if body.get("prompt_logprobs") else 0
    if last is not None:
        scored = specs.whole("prompt_logprobs_last_n", last, 1, max(1, len(prompt) - 1))
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise InputError("sampling_params must be an object")
    seed = sampling.get("seed")
    top_prompt, top_sample = (
        specs.whole(name, body.get(name) or 0, 0, _MOST_TOP)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
    )
    return SampleRequest(
        np.array(prompt, np.int32),
        specs.whole("num_samples", body.get("num_samples", 1), 1, MOST_SAMPLES),
        _sampling(sampling, context - len(prompt)),
        None if seed is None else specs.whole("sampling_params.seed", seed, -(2**63), 2**63 - 1) % 2**63,
        scored or (len(prompt) if top_prompt else 0),
        top_prompt,
        top_sample,
    )


def _sampling(raw: Mapping[str, Any], room: int) -> dict[str, Any]:
    tokens, stop = raw.get("max_tokens"), raw.get("stop")
    if tokens is not None:
        specs.whole("sampling_params.max_tokens", tokens, 1, 2**30)
    made: dict[str, Any] = {"max_new_tokens": room if tokens is None else min(tokens, room)}
    for ours, name, default in (("temperature", "temperature", 1.0), ("top_p", "top_p", 1.0), ("top_k", "top_k", -1)):
        value = raw.get(name)
        made[ours] = default if value is None else value
    stops = [stop] if isinstance(stop, str) else stop
    if stops == []:
        made["ignore_eos"] = True
    elif stops is not None:
        texts = isinstance(stops, list) and all(isinstance(one, str) for one in stops)
        if not texts and not (isinstance(stops, list) and all(type(one) is int for one in stops)):
            raise InputError("sampling_params.stop must be a text, a list of texts, or a list of token ids")
        made["stop" if texts else "stop_token_ids"] = stops
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """The most likely tokens at each position: ids int32 [n, k] and their log-probabilities float32 [n, k]."""

    ids: np.ndarray
    logprobs: np.ndarray

    def to_protobuf(self) -> bytes:
        n, k = self.ids.shape
        made = pb.delimited(1, np.ascontiguousarray(self.ids, "<i4").tobytes())
        made += pb.delimited(2, np.ascontiguousarray(self.logprobs, "<f4").tobytes())
        return made + pb.varint(3, k) + pb.varint(4, n)


def result(request: SampleRequest, answers: Sequence[Mapping[str, Any]]) -> bytes:
    """Write the answers of /generate as a SampleResponse. Raises MalformedAnswer."""
    try:
        made = b"".join(pb.delimited(1, _sequence(request, answer)) for answer in answers)
        meta = answers[0]["meta_info"]
        if request.scored:
            made += _scored(request, meta)
        return made + pb.varint(4, int(meta.get("cached_tokens") or 0))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedAnswer(f"the rollout server's answer lacks or mistypes a field: {error!r}") from error


def _sequence(request: SampleRequest, answer: Mapping[str, Any]) -> bytes:
    meta = answer["meta_info"]
    ids, logprobs = np.asarray(answer["output_ids"], "<i4"), np.asarray(meta["output_token_logprobs"], "<f4")
    if ids.ndim != 1 or ids.shape != logprobs.shape:
        raise ValueError(f"{ids.shape} tokens, {logprobs.shape} log-probabilities")
    made = pb.varint(1, 0 if meta["finish_reason"]["type"] == "stop" else _LENGTH)
    made += pb.delimited(2, ids.tobytes()) + pb.delimited(3, logprobs.tobytes())
    if request.top_sample:
        made += pb.delimited(4, _top(meta["output_top_logprobs"], request.top_sample).to_protobuf())
    return made


def _scored(request: SampleRequest, meta: Mapping[str, Any]) -> bytes:
    """Write the prompt's log-probabilities, NaN where none was asked for."""
    n = len(request.prompt)
    given = np.array([np.nan if row[0] is None else row[0] for row in meta["input_token_logprobs"]], "<f4")
    if len(given) != n:
        raise ValueError(f"{len(given)} log-probabilities of a prompt of {n} tokens")
    given[: n - request.scored] = np.nan
    made = pb.delimited(2, given.tobytes())
    if request.top_prompt:
        rows = meta["input_top_logprobs"]
        top = _top([row or [] for row in rows], request.top_prompt)
        unscored = slice(max(1, n - request.scored))
        top.ids[unscored], top.logprobs[unscored] = 0, _ABSENT
        made += pb.delimited(3, top.to_protobuf())
    return made


def _top(rows: Sequence[Sequence[Sequence[Any]]], k: int) -> Top:
    ids, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), _ABSENT, np.float32)
    for at, row in enumerate(rows):
        for column, (logprob, token, *_) in enumerate(row[:k]):
            ids[at, column], logprobs[at, column] = token, logprob
    return Top(ids, logprobs)


def to_json(data: bytes) -> dict[str, Any]:
    """Convert what `result` wrote to the JSON form."""
    found = pb.read(data)
    sequences = []
    for one in found.get(1, []):
        fields = pb.read(pb.part(one))
        sequences.append(
            {
                "stop_reason": "length" if fields.get(1) == [_LENGTH] else "stop",
                "tokens": np.frombuffer(pb.part(fields[2][-1]), "<i4").tolist(),
                "logprobs": np.frombuffer(pb.part(fields[3][-1]), "<f4").tolist(),
            }
        )
    made: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if 2 in found:
        given = np.frombuffer(pb.part(found[2][-1]), "<f4")
        made["prompt_logprobs"] = [None if np.isnan(one) else float(one) for one in given]
    return made
