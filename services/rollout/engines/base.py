"""The `Engine` protocol and its records. No heavy import: routes and tests run against any implementation.

Invariants of every implementation: output ids are exactly the sampled tokens (the stop token included), each with the
log-probability and the weight version it was sampled with; a failed stage changes nothing; weights change only in
`commit`, between two steps; when the engine dies, every waiting call fails with EngineDied. An engine may be wrong, so
`Live` is computed from the arrays that the next step will use, and the service checks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from shared.types import VersionSpan

GrammarKind = Literal["json_schema", "regex", "lark"]
FinishType = Literal["stop", "length", "abort"]
BASE_VERSION = "base"
type Arriving = asyncio.Future[Any]
"""Future that is done when all chunks have been pulled."""
OPTIONS = ("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "logit_bias", "grammar")
"""Fields of SamplingParams that not every engine honours."""
MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each position."""


@dataclass(frozen=True, slots=True)
class EngineServer:
    """External inference server that an engine forwards to.

    Args:
        folder: for weights; the server reads it under the same path.
        api_key_file: file with the server's API key.
        ca_file: certificate authorities for https:// (default: the system's).
    """

    url: str
    folder: str
    api_key_file: str | None = None
    ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings that an engine is started with.

    Args:
        model_path: folder with config.json, and model.safetensors if `load_weights`.
        load_weights: False starts without weights; the engine generates nothing until the first commit.
        dtype: of weights, activations and key/value pool.
        context_length: maximum number of tokens of prompt and output together, plus one.
        max_total_tokens: size of the key/value pool in tokens; None lets the engine choose.
        token_paddings, bs_paddings: shapes of prefill (tokens) and decode (requests) to compile at start; None compiles
            default shapes on first use.
        server: of the kinds that reach a server over HTTP; None for all others.
        tokenizer: the model's tokenizer.json, for grammars; None refuses them.
        adapters: shapes of the low-rank adapters that weights will have, by the trainer's names, to compile for them.
    """

    model_path: str
    load_weights: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    tp_size: int = 1
    context_length: int = 512
    max_running_requests: int = 64
    max_total_tokens: int | None = None
    max_prefill_tokens: int = 2048
    token_paddings: tuple[int, ...] | None = None
    bs_paddings: tuple[int, ...] | None = None
    server: EngineServer | None = None
    tokenizer: str | None = None
    adapters: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    @property
    def platform(self) -> str:
        """JAX's name of the device's platform. JAX's `gpu` also asks for ROCm, and fails where that is missing."""
        return "cuda" if self.device == "gpu" else self.device


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Report of a started engine: sizes in tokens, times in seconds.

    `options`: fields of SamplingParams that it honours among `OPTIONS`; requests that ask for others are refused.
    """

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int
    eos_token_ids: tuple[int, ...]
    boot_s: float
    pid: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """JSON schema, regular expression or grammar in llguidance's Lark syntax that a whole answer must match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k -1 keeps all tokens; without a seed every draw is different.

    Log-probabilities are those of the model's own distribution at the temperature, whatever else constrains the draw.

    Args:
        min_p: drops tokens less likely than this fraction of the likeliest one's probability.
        min_new_tokens: an answer does not end before so many tokens.
        frequency_penalty, presence_penalty: subtracted from the logits of tokens that the answer holds, for each
            occurrence or once.
        logit_bias: pairs of a token and what to add to its logit.
        grammar: what the answer matches. The model's end tokens are allowed only where the grammar may end; there they
            end the answer also with `ignore_eos`.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Request for one continuation.

    `input_ids`: int32[n], n >= 1, every id within the vocabulary. `rid` is unique among running requests.
    `routed_from`: first position for which to return the experts that processed the token; None returns none.
    `top_logprobs`: how many of the most likely tokens to return at each sampled position, at most MAX_TOP_LOGPROBS.
    """

    rid: str
    input_ids: np.ndarray
    sampling: SamplingParams
    routed_from: int | None = None
    top_logprobs: int = 0


class TopTokens(NamedTuple):
    """Most likely k tokens at each of n positions, the likeliest first: int32[n, k] ids, float32[n, k] natural
    logarithms of their probabilities, computed as the sampled token's.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Tokens that one step sampled for one request.

    `output_ids`: int32[n]; `logprobs`: float32[n]; `top` if the request asked; `version` of the weights that sampled.
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    top: TopTokens | None = None
    version: str = ""


type OnTokens = Callable[[NewTokens], None]
"""Receiver of a request's new tokens, called in the service's event loop after each step. It must not block."""


@dataclass(frozen=True, slots=True)
class FinishReason:
    """`matched` is the stop token of "stop", `length` the limit of "length", `message` the cause of "abort"."""

    type: FinishType
    matched: int | None = None
    length: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """Sampled tokens of one request.

    `output_ids`: int32[n]; `logprobs`: float32[n], natural logarithm at the request's temperature; spans cover 0..n.
    `routed_experts` [m, L, k] (shared.routing): experts of the positions from `routed_from` on, except the last
    position, which was not computed. After a weight change positions are computed again; the experts are those of the
    first computation. None if the request did not ask, or the model has no experts. `top` has n rows; None if the
    request did not ask. `waited_s` are the seconds in the queue, and from there to the first token, as far as it came
    and the engine measures them.
    """

    rid: str
    output_ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    routed_experts: np.ndarray | None = None
    top: TopTokens | None = None
    waited_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Log-probabilities of n given tokens under the weights `version`.

    `logprobs`: float32[n - 1], natural logarithm at temperature 1, of each token but the first given those before it.
    `top` has n - 1 rows, of the same positions; None if the caller did not ask.
    """

    version: str
    logprobs: np.ndarray
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot taken between two steps; `output_tokens` counts since the start.

    `cached_kv_tokens` are those of cached prefixes that no running request uses; they are not free, and may be evicted.
    """

    current: str | None = None
    staged: str | None = None
    digest: str = ""
    paused: bool = False
    running: int = 0
    queued: int = 0
    output_tokens: int = 0
    free_kv_tokens: int = 0
    cached_kv_tokens: int = 0
    compilations: int = 0
    steps: dict[str, int] = field(default_factory=dict[str, int])


class Engine(Protocol):
    """A running engine. Every method may raise EngineDied; `audit`, `status` and `abort` raise Unavailable if the
    engine is too busy to answer.

    An engine without a capability (`shared.engine_kinds.Capability`) never guesses:

    - exact_ids: it serves no run.
    - spans: `GenerateResult.versions` is one span, of the version that served when the request began.
    - in_flight_update: `commit` is called with mode "abort" alone, and ends running requests before weights change.
    - audit: `audit` returns the version that the server names; `LoadedWeights.checksum` and `Live.checksum` are empty.
    - routing: `GenerateResult.routed_experts` is None.
    - probe: `stage` ignores the probe, and `Live.logprobs` is None.

    An engine that forwards to a server loads weights in `commit`, which may then raise WeightsError or Unavailable;
    `audit` says what serves afterwards. It outlives its server: calls fail with EngineDied or Unavailable until it is
    back.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last sign of life. A busy engine, e.g. one that compiles, is not silent."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Run one request to its end. Cancelling the call aborts the request at the next step.

        `on_tokens` receives every token of the result, step by step, before the result. If it raises, the request is
        aborted and this call raises the same.

        Raises Unavailable while no weights are committed, and InputError for a grammar that cannot be compiled.
        """
        ...

    async def score(self, ids: np.ndarray, top_logprobs: int = 0) -> ScoredTokens:
        """Score given tokens, int32[n] with n >= 2 that fit the context, between two steps.

        `top_logprobs`: how many of the most likely tokens to return at each position, at most MAX_TOP_LOGPROBS.
        Running requests wait meanwhile; if there is not memory for both, they are computed again afterwards.

        Raises Unavailable while no weights are committed.
        """
        ...

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        """Load weights next to the serving ones while decoding continues. They replace weights that were staged before.

        Until `arriving` is done, missing chunks are still being pulled; an error of `arriving` is raised here.

        Raises WeightsError (files, names, shapes, contents or the probe differ), Unavailable (files cannot be read now)
        or OutOfMemory; then nothing is staged.
        """
        ...

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        """Make the staged weights serve. Raises Conflict if `version` is not staged.

        The result arrives before any answer that holds a token of the new weights.
        """
        ...

    async def audit(self) -> Live:
        """Describe the weights that serve now; taken between two steps."""
        ...

    async def status(self) -> EngineStatus: ...

    async def abort(self, rid: str | None) -> int:
        """End the request, or all of them for None; they return what they have sampled. Returns how many were ended."""
        ...

    async def pause(self) -> None:
        """Stop decoding; running requests keep their state, new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None:
        """Drop every cached prefix; running requests compute theirs again and go on."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the engine is closed. Raises EngineDied if it ends by itself."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
