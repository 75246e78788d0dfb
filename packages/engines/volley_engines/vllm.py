"""vLLM's HTTP server, as of 0.32 (run) and 0.33 (read), started with `VLLM_SERVER_DEV_MODE=1` and `--enable-scale-out`.

`/inference/v1/generate` takes and returns token ids, and names the weight version of every token. The routes for
weights (`/pause`, `/collective_rpc`, `/update_weight_version`, `/resume`) exist in development mode only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import numpy as np

from services.rollout.engines.base import GenerateRequest, ScoredTokens, TopTokens
from services.rollout.engines.staged import CommitMode
from shared.errors import ConfigError, Forbidden, InputError, NotFound, ServiceUnreachable, Unavailable, WeightsError
from volley_engines import wire
from volley_engines.wire import GENERATE_S, OnSampled, ServerAnswer, ServerFacts, ServerHttp

LOAD_S = 1800.0
_PAUSE_S, _LEAST_TEMPERATURE = 120.0, 0.01
_GENERATE = "/inference/v1/generate"
_START = "start it as docs/engines.md says: VLLM_SERVER_DEV_MODE=1 vllm serve … --enable-scale-out"


class VllmServer:
    """Implements `wire.ForeignServer`. `eos` are the model's end tokens, which end a text instead of the server's."""

    def __init__(self, http: ServerHttp, eos: Sequence[int]) -> None:
        self._http, self._eos = http, tuple(eos)
        self._is_processed = False

    async def facts(self) -> ServerFacts:
        try:
            await self.version()
            await self._http.call("POST", _GENERATE, _generate_body("check", [0], {"max_tokens": 1}), LOAD_S)
            version = await self._http.call("GET", "/version")
            info = await self._http.call("GET", "/server_info?config_format=json", timeout_s=_PAUSE_S)
        except (NotFound, Forbidden) as error:
            raise ConfigError(f"{error.detail}", error.hint or _START) from error
        return wire.read(self._http, "/server_info", lambda: self._facts(version, info["vllm_config"]))

    def _facts(self, version: Any, config: Any) -> ServerFacts:
        model, scheduler, cache = (config[one] for one in ("model_config", "scheduler_config", "cache_config"))
        self._is_processed = str(model.get("logprobs_mode", "raw_logprobs")).startswith("processed")
        blocks, size = cache.get("num_gpu_blocks"), cache.get("block_size")
        total = blocks * size if type(blocks) is int and type(size) is int else None
        name = f"vLLM {version['version']}"
        return ServerFacts(name, int(model["max_model_len"]), total, int(scheduler["max_num_seqs"]))

    async def version(self) -> str | None:
        found = await self._http.call("GET", "/weight_info")
        return found.get("weight_version") if isinstance(found, Mapping) else None

    async def check_health(self) -> None:
        await self._http.call("GET", "/health")

    async def generate(self, name: str, request: GenerateRequest, on_sampled: OnSampled | None) -> ServerAnswer:
        body = _generate_body(name, request.input_ids.tolist(), self._sampling(request))
        k = request.top_logprobs
        if on_sampled is None:
            answer = await self._http.call("POST", _GENERATE, body, GENERATE_S)
            return wire.read(self._http, _GENERATE, lambda: _sampled(answer["choices"][0], answer.get("usage"), k))
        answers = _VllmStream(k, on_sampled)
        body |= {"stream": True}
        await self._http.events(
            _GENERATE, body, lambda one: wire.read(self._http, _GENERATE, lambda: answers.take(one))
        )
        return wire.read(self._http, _GENERATE, answers.whole)

    async def score(self, ids: np.ndarray, top_logprobs: int) -> ScoredTokens:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_logprobs, "detokenize": False}
        answer = await self._http.call("POST", _GENERATE, _generate_body("score", ids.tolist(), sampling), LOAD_S)
        return wire.read(self._http, _GENERATE, lambda: _scored(answer, ids, top_logprobs))

    async def abort(self, names: Sequence[str]) -> None:
        await self._http.call("POST", "/abort_requests", {"request_ids": [_internal(name) for name in names]})

    async def pause(self, mode: CommitMode) -> None:
        kept = "abort" if mode == "abort" else "keep"
        await self._http.call("POST", "/pause?" + urlencode({"mode": kept}), timeout_s=_PAUSE_S)

    async def resume(self) -> None:
        await self._http.call("POST", "/resume", timeout_s=_PAUSE_S)

    async def load(self, folder: str, version: str, mode: CommitMode) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._http.call("POST", "/collective_rpc", body, LOAD_S)
            if mode != "in_place":
                await self.flush_cache()
            await self._http.call("POST", "/update_weight_version", {"new_version": version})
        except ServiceUnreachable:
            raise
        except (InputError, Unavailable) as error:
            raise WeightsError(error.detail, error.hint) from error

    async def flush_cache(self) -> None:
        answer = await self._http.call("POST", "/reset_prefix_cache?reset_running_requests=true", timeout_s=_PAUSE_S)
        if not (isinstance(answer, Mapping) and answer.get("success")):
            raise Unavailable(f"the server at {self._http.url} did not drop its cached prefixes: {str(answer)[:300]}")

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        """Make the sampling parameters. Raises InputError if the server's log-probabilities would be other ones."""
        given = request.sampling
        is_cut = given.top_p < 1 or given.top_k > 0
        if given.temperature not in (0.0, 1.0) and not self._is_processed:
            raise InputError(
                f"temperature={given.temperature:g}: the vLLM server reports log-probabilities at temperature 1",
                "start it with --logprobs-mode processed_logprobs, or sample at temperature 1",
            )
        if 0 < given.temperature < _LEAST_TEMPERATURE:
            raise InputError(f"temperature={given.temperature:g}: vLLM samples at {_LEAST_TEMPERATURE} instead")
        if is_cut and given.temperature and self._is_processed:
            raise InputError(
                "top_p and top_k: the vLLM server reports log-probabilities among the tokens that they keep",
                "start it with --logprobs-mode raw_logprobs and sample at temperature 1, or leave top_p and top_k out",
            )
        stops = given.stop_token_ids if given.ignore_eos else (*given.stop_token_ids, *self._eos)
        return {
            "max_tokens": given.max_new_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": max(given.top_k, 0),
            "seed": None if given.sampling_seed is None else given.sampling_seed % wire.SEEDS,
            "stop_token_ids": sorted({*stops}),
            "ignore_eos": True,
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,  # the sampled token is one of them
            "detokenize": False,
        }


class _VllmStream:
    def __init__(self, k: int, on_sampled: OnSampled) -> None:
        self._k, self._on_sampled = k, on_sampled
        self._ids, self._content, self._usage = list[Any](), list[Any](), None
        self._last: Mapping[str, Any] = {}

    def take(self, answer: Any) -> None:
        if "error" in answer:
            raise ValueError(str(answer["error"])[:300])
        self._usage = answer.get("usage") or self._usage
        for choice in answer["choices"]:
            ids, content = choice.get("token_ids") or [], _content(choice)
            if ids:
                self._on_sampled(*_tokens(ids, content, self._k))
            self._ids += ids
            self._content += content
            self._last = choice

    def whole(self) -> ServerAnswer:
        choice = {**self._last, "token_ids": self._ids, "logprobs": {"content": self._content}}
        return _sampled(choice, self._usage, self._k)


def _generate_body(name: str, ids: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in sampling.items() if value is not None}
    return {"request_id": name, "token_ids": ids, "sampling_params": kept}


def _internal(name: str) -> str:
    """Name that the server gives to a request of /inference/v1/generate."""
    return f"generate-tokens-{name}"


def _content(choice: Mapping[str, Any]) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []


def _tokens(ids: Any, content: Any, k: int) -> tuple[np.ndarray, np.ndarray, TopTokens | None]:
    found = wire.token_ids(ids)
    if [one["token_id"] for one in content] != ids:
        raise ValueError(f"log-probabilities of {len(content)} tokens, of other tokens than the {len(ids)} sampled")
    rows = [[(one["token_id"], one["logprob"]) for one in row["top_logprobs"]] for row in content]
    return found, wire.logprobs([one["logprob"] for one in content]), wire.top_tokens(rows, k) if k else None


def _sampled(choice: Mapping[str, Any], usage: Any, k: int) -> ServerAnswer:
    ids, logprobs, top = _tokens(choice.get("token_ids") or [], _content(choice), k)
    finish = wire.finish(choice["finish_reason"], ids, choice.get("stop_reason"))
    if not len(ids) and finish.type != "abort":
        raise ValueError("no token was sampled")
    versions = choice.get("weight_versions")
    cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    spans = None if versions is None and len(ids) else wire.spans(versions or [], len(ids))
    return ServerAnswer(ids, logprobs, finish, spans, None, int(cached), top)


def _scored(answer: Any, ids: np.ndarray, k: int) -> ScoredTokens:
    rows = answer["prompt_logprobs"][1:]
    if len(rows) != len(ids) - 1:
        raise ValueError(f"log-probabilities of {len(rows)} tokens for {len(ids) - 1}")
    found = wire.logprobs([row[str(token)]["logprob"] for row, token in zip(rows, ids[1:].tolist(), strict=True)])
    tops = [[(int(token), one["logprob"]) for token, one in row.items()] for row in rows]
    version = answer["choices"][0]["weight_versions"][-1]["version"]
    return ScoredTokens(str(version), found, wire.top_tokens(tops, k) if k else None)
