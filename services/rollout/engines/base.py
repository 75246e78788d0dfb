"""What the service knows of an engine. No heavy import: routes and tests run against any implementation of `Engine`.

Invariants of every implementation: output ids are exactly the sampled tokens (the stop token included), each with the
log-probability and the weight version it was sampled with; a failed stage changes nothing; weights change only in
`commit`, between two steps; the engine's death fails every waiting call with EngineDied. An engine may be wrong: what
it says of its weights (`Live`) is computed from the arrays that the next step will use, and the service judges it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from shared.run.checkpoint_files import ManifestFile, ManifestLeaf
from shared.types import VersionSpan

CommitMode = Literal["retract", "abort", "in_place"]
FinishType = Literal["stop", "length", "abort"]
BASE_VERSION = "base"
type Arriving = asyncio.Future[Any]
"""Done once all that is awaited is there."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine.

    Args:
        model_path: folder with config.json, and model.safetensors if `load_weights`.
        load_weights: False starts without weights: nothing is generated until the first commit.
        dtype: of weights, activations and key/value pool.
        context_length: most tokens of prompt and output together, plus one.
        max_total_tokens: size of the key/value pool in tokens; None lets the engine choose.
        token_paddings, bs_paddings: shapes of prefill (tokens) and decode (requests) to compile at start; None compiles
            default shapes when first met.
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine reports: sizes in tokens, times in seconds."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int
    eos_token_ids: tuple[int, ...]
    boot_s: float
    pid: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k -1 is all; without a seed the draw is different every time."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """`input_ids`: int32[n], n >= 1, every id within the vocabulary. `rid` is unique among running requests.
    `routed_from`: the position from which on the experts are wanted that tokens were sent to; None wants none.
    """

    rid: str
    input_ids: np.ndarray
    sampling: SamplingParams
    routed_from: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """`ids`: int32[n], n >= 1; what is wanted are the log-probabilities of those after `start`, and texts if
    `with_texts`.
    """

    ids: np.ndarray
    start: int
    with_texts: bool


@dataclass(frozen=True, slots=True)
class FinishReason:
    """`matched` is the stop token of "stop", `length` the limit of "length", `message` the cause of "abort"."""

    type: FinishType
    matched: int | None = None
    length: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """`output_ids`: int32[n]; `logprobs`: float32[n], natural logarithm at the request's temperature;
    spans cover 0..n. `routed_experts` [m, L, k] (shared.routing): of the positions from `routed_from` on but the last,
    which was not computed; each as it was when it was computed first, for later weights compute it again. None where
    nobody asked, or the model has no experts.
    """

    rid: str
    output_ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class StagedBase:
    """What adapters are of: `folder` holds it below `params/`. An engine reads it once, and keeps it for the next
    adapters of the same `digest`; what serves is the base with `scale` times the product of each adapter's halves
    (shared.models.adapter).
    """

    folder: str
    digest: str
    files: tuple[ManifestFile, ...]
    tree: tuple[ManifestLeaf, ...]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """`logprobs`: float32[n - 1], natural logarithm at temperature 1, of all but the first of n given tokens, each
    after those before it; computed by the weights `version`.
    """

    version: str
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class StagedWeights:
    """Weights to stage: `kind` says whether `folder` is a checkpoint, with an Orbax folder `below` it, a folder of
    chunks (shared.published.chunks), or a Hugging Face folder.

    Of chunks, `files` are those of the version's stream in their order, each with its digest for a name, and `tree` are
    the arrays in the stream, in their order; a `base` is of chunks as well. Those that are still on their way come in
    the order that the `seed` draws (shared.published.order).

    A checkpoint's `files` are as its manifest names them: an engine reads each once (see
    `shared.run.checkpoint_files.copy_files`) and loads the very bytes whose digest it has taken. What they hold must
    have exactly the leaves of `tree`. With a probe (int32[n] ids, float32[n-1] log-probabilities of all but the first,
    and the noise of the trainer's dtype in nats, if known) the engine must agree with it. With a `base` these are
    adapters of it."""

    folder: str
    version: str
    digest: str = ""
    kind: Literal["orbax", "chunks", "hf"] = "orbax"
    below: str = ""
    files: tuple[ManifestFile, ...] = ()
    tree: tuple[ManifestLeaf, ...] = ()
    probe_ids: np.ndarray | None = None
    probe_logprobs: np.ndarray | None = None
    probe_noise: float | None = None
    base: StagedBase | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Staged weights: `checksum` of their arrays, bit for bit; `timings` are durations in seconds."""

    checksum: str
    timings: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """What the next step will compute with: its label, the checksum of its arrays, and its log-probabilities float32[m]
    of the first m + 1 tokens of the probe that was staged with the version, if any.
    """

    version: str | None
    checksum: str
    logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CommitResult:
    """What a commit did to the running requests; `pause_s` is how long decoding stood still, `live` what
    serves since.
    """

    version: str
    previous: str | None
    continued: int
    aborted: int
    pause_s: float
    live: Live


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot taken between two steps; `output_tokens` counts since the start."""

    current: str | None = None
    staged: str | None = None
    digest: str = ""
    paused: bool = False
    running: int = 0
    queued: int = 0
    output_tokens: int = 0
    free_kv_tokens: int = 0
    compilations: int = 0
    steps: dict[str, int] = field(default_factory=dict[str, int])


class Engine(Protocol):
    """An engine that is up. Every method may raise EngineDied; `audit`, `status` and `abort` Unavailable where it is
    too busy to answer.

    An engine without a capability (`shared.engines.Capability`) never makes up what it cannot know:

    - exact_ids: it serves no run.
    - spans: `GenerateResult.versions` is one span, of the version that served when the request began.
    - in_flight_update: `commit` is called with mode "abort" alone, and ends running requests before weights change.
    - audit: `audit` is not called; `LoadedWeights.checksum` and `Live.checksum` are empty.
    - routing: `GenerateResult.routed_experts` is None.
    - probe: `stage` ignores the probe, and `Live.logprobs` is None.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def silent_s(self) -> float:
        """How long the engine has not been heard of, in seconds; it may be busy for longer, e.g. compile, without
        falling silent.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Runs one request to its end. Cancelling the call aborts the request.

        Raises Unavailable while no weights are committed.
        """
        ...

    async def score(self, ids: np.ndarray) -> ScoredTokens:
        """Scores a whole text, int32[n] with n >= 2 that fits the context, between two steps: requests that run wait
        meanwhile, and begin anew where there is no memory for both.

        Raises Unavailable while no weights are committed.
        """
        ...

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        """Loads weights beside the serving ones while decoding goes on; replaces what was staged. Until `arriving` is
        done, chunks that are not in their folder yet are on their way; what it raises, this raises.

        Raises WeightsError (files, names, shapes, contents or the probe differ), Unavailable (files cannot be read now)
        or OutOfMemory; then nothing is staged.
        """
        ...

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        """Makes the staged weights serve. Raises Conflict if `version` is not staged.

        The result is known before any answer that holds a token of the new weights.
        """
        ...

    async def audit(self) -> Live:
        """What serves now, between two steps."""
        ...

    async def status(self) -> EngineStatus: ...

    async def abort(self, rid: str | None) -> int:
        """Ends the request, or all of them for None, with what they have produced; the number of requests ended."""
        ...

    async def pause(self) -> None:
        """Stops decoding; running requests keep their state, new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests recompute theirs and go on."""
        ...

    async def wait_closed(self) -> None:
        """Returns when the engine was closed; raises EngineDied when it ended by itself."""
        ...

    async def close(self) -> None:
        """Ends the engine and its processes."""
        ...
