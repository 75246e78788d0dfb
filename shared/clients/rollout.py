"""Client of a rollout server: token ids in, token ids and behaviour log-probabilities out, and weight updates.

Every `Generation` is checked: as many log-probabilities as ids, all finite, version spans that cover them, and the
number of prompt tokens that was sent. If a check fails, the answer is dropped and the server counts as unavailable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.bounds import MAX_OBJECTS
from shared.clients.base import MALFORMED, HttpClient
from shared.errors import DecodeError, Unavailable
from shared.published.manifest import WeightOffer
from shared.routing import RoutingShape, from_wire
from shared.teacher_view import MOST_POSITIVE, TeacherLogprobs
from shared.types import VersionSpan, WeightVersion

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport

_WEIGHTS_TIMEOUT_S = 600.0
_ROW_OBJECTS = 8  # per token in SGLang's JSON: its id, and a row of three


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens that a server sampled after one prompt.

    Shapes: `output_ids` int32 [n], stop token included as sampled; `logprobs` float32 [n] (behaviour, natural log).
    `versions` are positions in the output, with the server's URL. `finish_reason` is stop, length or abort; n may be 0
    after an abort. `routed_experts` [m, L, k] (shared.routing) starts at the requested position, and lacks the last
    one; None if not requested, or not returned.
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RefusedWeights:
    """Version that a server no longer loads, because its weights were refused repeatedly for the same reason."""

    version: WeightVersion
    reason: str


@dataclass(frozen=True, slots=True)
class ServerWeights:
    """Versions that a server serves (`current`) and has loaded next to it (`staged`); None without one.

    `digest` identifies the current weights. `refused` is the newest version, if the server refuses it for good.
    """

    current: str | None
    staged: str | None
    digest: str | None
    refused: RefusedWeights | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one rollout server, from its own report.

    `max_running` requests decode at once, `queued` ones wait; `free_kv` is the free share of the key/value pool.
    """

    running: int
    queued: int
    max_running: int
    free_kv: float


class RolloutClient(HttpClient):
    """Every method raises VolleyError: ServiceUnreachable, or the error in the server's problem body.

    Args:
        routing: of the run's model, if it has experts; experts of another shape are rejected.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        transport: AsyncBaseTransport | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        super().__init__(base_url, token=token, ca_file=ca_file, transport=transport)
        self._routing = routing

    async def generate(
        self,
        input_ids: np.ndarray,
        sampling: Mapping[str, Any],
        rid: str,
        *,
        timeout_s: float | None = None,
        routed_from: int | None = None,
    ) -> Generation:
        """Sample a continuation of `input_ids` (int32 [T]). Not idempotent, so never repeated here.

        Args:
            sampling: SGLang's `sampling_params`: max_new_tokens, temperature, top_p, top_k, stop_token_ids,
        sampling_seed.
            rid: id of the request for `abort`. Volley's servers compare whole ids, SGLang's compare prefixes: use ids
        of one length.
            routed_from: first position to return experts of; None for no experts.

        Raises:
            Unavailable: the answer breaks an invariant of `Generation`.
        """
        body = {"input_ids": input_ids, "sampling_params": sampling, "rid": rid}
        if routed_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
        limit = int(sampling["max_new_tokens"])
        answer = await self.post("/generate", body, timeout_s=timeout_s, max_objects=MAX_OBJECTS + _ROW_OBJECTS * limit)
        try:
            generation = _generation(answer, len(input_ids), self.base_url)
            _check(generation, limit)
            if generation.routed_experts is not None:
                n_sampled = len(generation.output_ids)
                _check_routed(len(generation.routed_experts), len(input_ids), n_sampled, routed_from)
                if self._routing is not None:
                    self._routing.check_bounds(generation.routed_experts)
        except DecodeError as error:
            raise Unavailable(f"{self.base_url} returned an invalid generation: {error.detail}") from error
        return generation

    async def score(self, ids: np.ndarray, start: int, *, timeout_s: float | None = None) -> TeacherLogprobs:
        """Return the log-probabilities of ids[start:], given all tokens before, at temperature 1, and their version.

        `ids` is int32 [T], 0 < start < T. Raises Unavailable for an answer that is not one log-probability per token.
        """
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        n_objects = MAX_OBJECTS + _ROW_OBJECTS * len(ids)
        answer = await self.post("/generate", body, timeout_s=timeout_s, max_objects=n_objects)
        try:
            return _scored(answer, ids[start:])
        except (*MALFORMED, DecodeError) as error:
            raise Unavailable(f"{self.base_url} returned invalid log-probabilities: {error!r}") from error

    async def abort(self, rid: str) -> None:
        """End a running request; its answer is what it has sampled. Unknown ids are ignored."""
        await self.post("/abort_request", {"rid": rid})

    async def weights(self) -> ServerWeights:
        answer = await self.get("/weights", attempts=1)
        if not isinstance(answer, dict):
            raise DecodeError(f"{self.base_url}/weights did not answer with an object")
        current, staged, digest = (_text(answer.get(name)) for name in ("current", "staged", "digest"))
        return ServerWeights(current, staged, digest, _refused(answer.get("refused")))

    async def load(self) -> EngineLoad:
        """Return the server's present load."""
        answer = await self.get("/get_server_info", attempts=1)
        try:
            now = answer["internal_state"]
            share = int(now["free_kv_tokens"]) / max(1, int(answer["max_total_tokens"]))
            return EngineLoad(int(now["running"]), int(now["queued"]), int(answer["max_running_requests"]), share)
        except MALFORMED as error:
            raise DecodeError(f"{self.base_url}/get_server_info lacks or mistypes a field: {error!r}") from error

    async def ready(self) -> None:
        """Raise Unavailable with the reason while no request should be routed to the server."""
        await self.get("/ready", attempts=1)

    async def stage(self, manifest: Path) -> dict[str, Any]:
        """Load weights beside the current ones, while decoding continues. Idempotent by version."""
        return await self.post("/weights/stage", {"manifest": str(manifest)}, attempts=3, timeout_s=_WEIGHTS_TIMEOUT_S)

    async def commit(self, version: str, mode: str, *, base_version: str | None = None) -> dict[str, Any]:
        """Make staged weights current, between two decode steps. Raises Conflict if `base_version` is not current."""
        body = {"version": version, "mode": mode} | ({"base_version": base_version} if base_version else {})
        return await self.post("/weights/commit", body, timeout_s=_WEIGHTS_TIMEOUT_S)

    async def hold(self, holder: str, version: str, seconds: float) -> None:
        """Keep `version` serving for `seconds`; 0 releases it. Raises Conflict if the server does not have it."""
        await self.post("/weights/hold", {"holder": holder, "version": version, "seconds": seconds})

    async def update_weights(self, offer: WeightOffer, mode: str) -> dict[str, Any]:
        """Stage and commit a published version."""
        return await self.post("/update_weights", {**offer.to_json(), "mode": mode}, timeout_s=_WEIGHTS_TIMEOUT_S)


def _generation(answer: Any, n_prompt: int, server: str) -> Generation:
    try:
        meta = answer["meta_info"]
        generation = Generation(
            output_ids=_ids(answer["output_ids"]),
            logprobs=_logprobs(meta["output_token_logprobs"]),
            versions=tuple(
                VersionSpan(str(s["version"]), int(s["start"]), int(s["end"]), server) for s in meta["weight_versions"]
            ),
            finish_reason=str(meta["finish_reason"]["type"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            routed_experts=from_wire(meta["routed_experts"]) if "routed_experts" in meta else None,
        )
        seen = int(meta["prompt_tokens"])
    except MALFORMED as error:
        raise DecodeError(f"the generation lacks or mistypes a field: {error!r}") from error
    if seen != n_prompt:
        raise DecodeError(f"the server received {seen} of {n_prompt} prompt tokens")
    return generation


def _scored(answer: Any, ids: np.ndarray) -> TeacherLogprobs:
    """Read rows [log-probability, id, text] that begin with the token before `ids`. Raises ValueError and others."""
    meta = answer["meta_info"]
    _, *rows = meta["input_token_logprobs"]
    logprobs = np.array([row[0] for row in rows], np.float32)
    if [row[1] for row in rows] != ids.tolist():
        raise ValueError("they are of other tokens")
    if not np.isfinite(logprobs).all() or logprobs.max() > MOST_POSITIVE:
        raise ValueError("one is NaN, infinite or positive")
    return TeacherLogprobs(logprobs, str(WeightVersion.parse(str(meta["weight_version"]))))


def _ids(value: Any) -> np.ndarray:
    """Return int32 [n]. Other dtypes are refused: converting them would change the ids."""
    found = _flat(np.asarray(value))
    if found.size and (found.dtype.kind not in "iu" or int(found.max()) >= 2**31):
        raise ValueError(f"output_ids are of dtype {found.dtype}, not ids")
    return found.astype(np.int32)


def _flat(found: np.ndarray) -> np.ndarray:
    if found.ndim != 1:
        raise ValueError(f"{found.ndim} dimensions, expected one")
    return found


def _logprobs(value: Any) -> np.ndarray:
    """Return float32 [n], from an array, a list of numbers, or SGLang's [log-probability, token id, text] rows."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Sequence):
        value = [row[0] for row in value]
    return _flat(np.asarray(value, np.float32))


def _check(generation: Generation, max_new_tokens: int) -> None:
    n = len(generation.output_ids)
    if n > max_new_tokens:
        raise DecodeError(f"{n} tokens, but at most {max_new_tokens} were requested")
    if generation.finish_reason not in ("stop", "length", "abort"):
        raise DecodeError(f"unknown finish reason {generation.finish_reason!r}")
    if len(generation.logprobs) != n:
        raise DecodeError(f"{len(generation.logprobs)} log-probabilities for {n} tokens")
    if n and not (np.isfinite(generation.logprobs).all() and generation.logprobs.max() <= 1e-3):
        raise DecodeError("a log-probability is not finite or not negative")
    if n and generation.output_ids.min() < 0:
        raise DecodeError("an output id is negative")
    if n == 0 and generation.finish_reason != "abort":
        raise DecodeError("nothing was sampled")
    end = 0
    for span in generation.versions:
        if span.start != end or span.end <= span.start:
            raise DecodeError("the version spans have a gap or overlap")
        WeightVersion.parse(span.version)
        end = span.end
    if end != n:
        raise DecodeError(f"the version spans cover {end} of {n} tokens")


def _check_routed(n: int, n_prompt: int, n_sampled: int, first: int | None) -> None:
    """Check the number of positions with experts; a request aborted before its first token may return fewer."""
    expected = 0 if first is None else n_prompt + n_sampled - 1 - first
    if n > expected or (n < expected and n_sampled):
        raise DecodeError(f"experts of {n} positions, but {expected} were requested")


def _refused(value: Any) -> RefusedWeights | None:
    """Read the refusal in a server's answer. Raises DecodeError."""
    if value is None:
        return None
    try:
        return RefusedWeights(WeightVersion.parse(value["version"]), str(value["reason"]))
    except MALFORMED as error:
        raise DecodeError(f"the refused weights lack or mistype a field: {error!r}") from error


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
