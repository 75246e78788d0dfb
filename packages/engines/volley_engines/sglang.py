"""SGLang's HTTP server, as of 0.5.23: `/generate` with token ids, `/update_weights_from_disk`, pause and resume.

Log-probabilities are those of the logits divided by the temperature, before top-p and top-k, like the engine's own.
`sampling_seed` has an effect only if the server was started with `--enable-deterministic-inference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.rollout.engines.base import GenerateRequest, ScoredTokens, TopTokens
from services.rollout.engines.staged import CommitMode
from shared.errors import ConfigError, InputError, NotFound, ServiceUnreachable, Unavailable, WeightsError
from volley_engines import wire
from volley_engines.wire import GENERATE_S, OnSampled, ServerAnswer, ServerFacts, ServerHttp

HEALTH_S = 30.0  # the server itself waits up to 20 s for its scheduler
LOAD_S = 1800.0
_PAUSE_S = 120.0
_BESIDE_PROMPT = 6
"""Tokens that the server keeps of its context for the answer to the longest prompt."""


class SglangServer:
    """Implements `wire.ForeignServer`. `eos` are the model's end tokens; the server also stops at its own."""

    def __init__(self, http: ServerHttp, eos: Sequence[int]) -> None:
        self._http, self._eos = http, tuple(eos)

    async def facts(self) -> ServerFacts:
        info = await self._info("/server_info", "/get_server_info")
        if (await self.version()) is None:
            raise ConfigError(f"the server at {self._http.url} names no weight_version", "use SGLang 0.5.23 or later")
        internal = next(iter(info.get("internal_states") or [info.get("internal_state") or {}]), {})
        known = {**info, **internal}

        def size(*names: str) -> int | None:
            return next((known[one] for one in names if type(known.get(one)) is int), None)

        longest = size("max_req_input_len")
        return ServerFacts(
            f"SGLang {info.get('version', '')}".strip(),
            size("context_length") if longest is None else longest + _BESIDE_PROMPT,
            size("max_total_num_tokens", "max_total_tokens"),
            size("effective_max_running_requests_per_dp", "max_running_requests"),
        )

    async def version(self) -> str | None:
        found = (await self._info("/model_info", "/get_model_info")).get("weight_version")
        return found if isinstance(found, str) else None

    async def check_health(self) -> None:
        await self._http.call("GET", "/health", timeout_s=HEALTH_S)

    async def generate(self, name: str, request: GenerateRequest, on_sampled: OnSampled | None) -> ServerAnswer:
        body = self._body(name, request) | {"stream": on_sampled is not None}
        k, n_prompt = request.top_logprobs, len(request.input_ids)
        if on_sampled is None:
            answer = await self._http.call("POST", "/generate", body, GENERATE_S)
            return wire.read(self._http, "/generate", lambda: _sampled(answer, k, n_prompt))
        answers = _SglangStream(k, n_prompt, on_sampled)
        await self._http.events(
            "/generate", body, lambda one: wire.read(self._http, "/generate", lambda: answers.take(one))
        )
        return wire.read(self._http, "/generate", answers.whole)

    async def score(self, ids: np.ndarray, top_logprobs: int) -> ScoredTokens:
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_logprobs,
        }
        answer = await self._http.call("POST", "/generate", body, LOAD_S)
        return wire.read(self._http, "/generate", lambda: _scored(answer, ids, top_logprobs))

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            await self._http.call("POST", "/abort_request", {"rid": name})

    async def pause(self, mode: CommitMode) -> None:
        await self._http.call("POST", "/pause_generation", {"mode": mode}, _PAUSE_S)

    async def resume(self) -> None:
        await self._http.call("POST", "/continue_generation", {}, _PAUSE_S)

    async def load(self, folder: str, version: str, mode: CommitMode) -> None:
        body = {"model_path": folder, "weight_version": version, "flush_cache": mode != "in_place"}
        try:
            answer = await self._http.call("POST", "/update_weights_from_disk", body, LOAD_S)
        except ServiceUnreachable:
            raise
        except (InputError, Unavailable) as error:
            raise WeightsError(error.detail, error.hint) from error
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise WeightsError(f"the server at {self._http.url} did not load {version}: {str(answer)[:300]}")

    async def flush_cache(self) -> None:
        """Drop cached prefixes. Running requests are put back into the queue first: the server refuses otherwise."""
        await self.pause("retract")
        try:
            await self._http.call("POST", "/flush_cache")
        finally:
            await self.resume()

    async def _info(self, path: str, older: str) -> Mapping[str, Any]:
        try:
            found = await self._http.call("GET", path)
        except NotFound:
            found = await self._http.call("GET", older)
        if not isinstance(found, Mapping):
            raise self._http.wrong(path, "no JSON object")
        return found

    def _body(self, name: str, request: GenerateRequest) -> dict[str, Any]:
        sampling, params = request.sampling, dict[str, Any]()
        stops = () if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos)
        params |= {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": sorted({*stops}),
        }
        if sampling.sampling_seed is not None:
            params["sampling_seed"] = sampling.sampling_seed % wire.SEEDS
        return {
            "rid": name,
            "input_ids": request.input_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
        }


class _SglangStream:
    """Answers of a stream: each holds all tokens so far, or, with `--incremental-streaming-output`, the new ones."""

    def __init__(self, k: int, n_prompt: int, on_sampled: OnSampled) -> None:
        self._k, self._n_prompt, self._on_sampled = k, n_prompt, on_sampled
        self._ids, self._rows, self._tops = list[int](), list[Any](), list[Any]()
        self._last: Mapping[str, Any] | None = None

    def take(self, answer: Any) -> None:
        if "error" in answer:
            raise ValueError(str(answer["error"])[:300])
        meta, self._last = answer["meta_info"], answer
        total, before = meta["completion_tokens"], len(self._ids)
        new = total - before
        for kept, given in (
            (self._ids, answer["output_ids"]),
            (self._rows, meta["output_token_logprobs"]),
            (self._tops, meta.get("output_top_logprobs") or [None] * new),
        ):
            kept.extend(given[len(given) - new :] if new else ())
        if new > 0:
            part = _tokens(self._ids[before:], self._rows[before:], self._tops[before:], self._k)
            self._on_sampled(*part)

    def whole(self) -> ServerAnswer:
        if self._last is None:
            raise ValueError("no event")
        meta = {**self._last["meta_info"], "output_token_logprobs": self._rows, "output_top_logprobs": self._tops}
        return _sampled({"output_ids": self._ids, "meta_info": meta}, self._k, self._n_prompt)


def _tokens(ids: Any, rows: Any, tops: Any, k: int) -> tuple[np.ndarray, np.ndarray, TopTokens | None]:
    found = wire.token_ids(ids)
    if [row[1] for row in rows] != ids:
        raise ValueError(f"log-probabilities of {len(rows)} tokens, of other tokens than the {len(ids)} sampled")
    top = wire.top_tokens([[(one[1], one[0]) for one in row] for row in tops], k) if k else None
    if top is not None and len(top.ids) != len(found):
        raise ValueError(f"the most likely tokens of {len(top.ids)} positions for {len(found)}")
    return found, wire.logprobs([row[0] for row in rows]), top


def _sampled(answer: Any, k: int, n_prompt: int) -> ServerAnswer:
    meta, ids = answer["meta_info"], answer["output_ids"]
    found, logprobs, top = _tokens(ids, meta["output_token_logprobs"] or [], meta.get("output_top_logprobs"), k)
    if (seen := meta["prompt_tokens"]) != n_prompt:
        raise ValueError(f"{seen} prompt tokens for {n_prompt}")
    reason, versions = meta["finish_reason"], meta.get("weight_versions")
    finish = wire.finish(reason["type"], found, reason.get("matched"), reason.get("message"))
    if not len(found) and finish.type != "abort":
        raise ValueError("no token was sampled")
    spans = None if versions is None else wire.spans(versions, len(found))
    return ServerAnswer(
        found, logprobs, finish, spans, meta.get("weight_version"), int(meta.get("cached_tokens") or 0), top
    )


def _scored(answer: Any, ids: np.ndarray, k: int) -> ScoredTokens:
    meta = answer["meta_info"]
    rows = meta["input_token_logprobs"]
    if [row[1] for row in rows] != ids.tolist():
        raise ValueError(f"log-probabilities of {[row[1] for row in rows]} for the tokens {ids.tolist()}")
    tops = meta["input_top_logprobs"][1:] if k else []
    top = wire.top_tokens([[(one[1], one[0]) for one in row] for row in tops], k) if k else None
    return ScoredTokens(str(meta["weight_version"]), wire.logprobs([row[0] for row in rows[1:]]), top)
