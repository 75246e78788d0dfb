"""Sample one assistant turn, in several parts if a weight update cuts it short or a server fails.

Every part continues exactly the recorded ids; tokens of a failed server are lost and sampled again. A repeated attempt
reuses the turns already sampled while the environment gives the same answers; otherwise an error names the turn.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import blake3

from services.orchestrator import metrics
from services.orchestrator.episodes.budget import SampledTurn, TokenBudget
from services.orchestrator.episodes.context import EpisodeContext
from services.orchestrator.episodes.failures import EpisodeChanged, WrongVersion
from services.orchestrator.episodes.recorder import Recorder
from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from services.orchestrator.status import RunStatus
from shared.clients.rollout import Generation
from shared.errors import RateLimited, Unavailable, VolleyError
from shared.process import telemetry, tracing
from shared.run import seeding
from shared.types import WeightVersion

_ABORT_S = 2.0
_log = telemetry.Log("turns")
_MOST_EMPTY = 64
"""Most answers in a row without a token, for one turn."""


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Limits of one episode. `context_length` and `max_response_length` (of one turn) are in tokens.

    `drops_oldest`: when the context is full, the oldest turns are dropped instead of ending the episode.
    """

    context_length: int
    max_response_length: int
    max_turns: int
    timeout_s: float
    max_attempts: int
    drops_oldest: bool = False

    def room(self, n_tokens: int) -> int:
        """Return how many tokens may follow `n_tokens`; engines need the sum below their context length."""
        return self.context_length - 1 - n_tokens


class TurnBarrier(Protocol):
    """Holds episodes before each turn until the others that still run have reached theirs."""

    async def turn(self) -> None:
        """Wait for the others."""
        ...

    def leave(self) -> None:
        """Remove an episode that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The episode to run. `sampling` holds temperature, top_p and top_k; `ticket` is 0 for an evaluation.

    `routing`: record the experts that tokens are sent to, for the trainer. `barrier`: the episode waits for others
    before each turn. `context` takes what is known of the episode besides its tokens, for a privileged teacher.
    """

    env: str
    split: str
    index: int
    ticket: int
    sample_index: int
    seed: int
    sampling: Mapping[str, Any]
    need: VersionBounds
    routing: bool = False
    barrier: TurnBarrier | None = None
    context: EpisodeContext | None = None


@dataclass(slots=True)
class EpisodeState:
    """State of a running episode: its record, its server, its budget, seconds spent generating.

    `max_new_tokens` limits a turn further than the run's bounds; `draw` distinguishes samples that
    start at the same position.
    """

    spec: SamplingSpec
    budget: TokenBudget
    recorder: Recorder
    server_url: str | None = None
    generate_s: float = 0.0
    max_new_tokens: int | None = None
    draw: int = 0


class TurnSampler:
    """Asks rollout servers for turns; one object serves all episodes.

    Args:
        is_kept: returns True if tokens of a cancelled request are kept for the next start of this process.
    """

    def __init__(
        self,
        balancer: Balancer,
        status: RunStatus,
        end_ids: Collection[int],
        bounds: TokenBounds,
        is_kept: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_kept = is_kept
        self._balancer, self._status, self._end_ids, self._bounds = balancer, status, sorted(end_ids), bounds

    async def turn(self, episode: EpisodeState) -> list[int]:
        """Record one assistant turn; return its ids, which end with one of `end_ids` unless a limit cut it.

        Raises:
            VolleyError: the attempts are used up.
        """
        if episode.spec.barrier is not None:
            with episode.budget.outage():
                await episode.spec.barrier.turn()
        recorder, start = episode.recorder, len(episode.recorder)
        turn, limit = self._turn_to_repeat(episode), self._bounds.max_response_length
        limit = min(limit, episode.max_new_tokens or limit)
        n_parts = n_empty = 0
        while n_empty < _MOST_EMPTY:
            room = min(limit - (len(recorder) - start), self._bounds.room(len(recorder)))
            if room <= 0:
                return recorder.ids_since(start)
            if n_parts == len(turn.parts):
                turn.parts.append(await self._sample_part(episode, room))
            generation = turn.parts[n_parts]
            recorder.add_sampled(generation)
            episode.budget.n_sampled += len(generation.output_ids)
            episode.budget.progressed()
            n_parts, n_empty = n_parts + 1, 0 if len(generation.output_ids) else n_empty + 1
            self._status.moved()
            ids = recorder.ids_since(start)
            if generation.finish_reason != "abort" or (ids and ids[-1] in self._end_ids):
                return ids
        raise Unavailable(f"a turn was cut short {_MOST_EMPTY} times before a token was sampled")

    def _turn_to_repeat(self, episode: EpisodeState) -> SampledTurn:
        """Return an earlier attempt's sample of this turn, if it continues the same ids; else a turn without parts.

        If failures depend on the answer, sampling another answer instead would bias the sample.
        """
        turns, number = episode.budget.sampled, max(0, episode.budget.turn - 1)
        before = blake3.blake3(episode.recorder.prompt().tobytes()).digest()
        if number < len(turns) and turns[number].before != before:
            changed = EpisodeChanged(f"{episode.spec.env} answered turn {number} differently when it was repeated")
            episode.budget.record(changed)
            _log.error("episode changed", ticket=episode.spec.ticket, turn=number, error=str(changed))
        elif number < len(turns):
            versions = [WeightVersion.parse(span.version) for part in turns[number].parts for span in part.versions]
            if all(self.is_usable(version, episode.spec.need) for version in versions):
                return turns[number]
        turns[number:] = [SampledTurn(before)]
        return turns[number]

    def is_usable(self, version: WeightVersion, need: VersionBounds) -> bool:
        """True if tokens of these weights may still be trained on."""
        return version.step >= (need.min_step or 0) and not self._balancer.is_undone(version)

    async def _sample_part(self, episode: EpisodeState, max_new_tokens: int) -> Generation:
        """Sample one part of the turn: choose a server, and another one after a failure, while the budget allows."""
        recorder, clock = episode.recorder, asyncio.get_running_loop().time
        while True:
            started = clock()
            try:
                with tracing.span("model call", {"gen_ai.usage.input_tokens": len(recorder)}, kind="client") as span:
                    with episode.budget.outage():
                        await self._balancer.wait_routable(episode.spec.need)
                    async with self._balancer.server(episode.spec.need, episode.server_url) as server:
                        episode.server_url = server.url
                        with self._status.waits_on("rollout"):
                            generation = await self._generate(server, episode, max_new_tokens)
                    span.set({"server.address": server.url, **_described(generation)})
                    return generation
            except RateLimited as error:
                await asyncio.sleep(error.retry_after_s)
            except VolleyError as error:
                episode.budget.count_failure(error, clock() - started)
            finally:
                elapsed = clock() - started
                episode.generate_s += elapsed
                metrics.GENERATE_SECONDS.observe(elapsed)

    async def _generate(self, server: ServerLoad, episode: EpisodeState, max_new_tokens: int) -> Generation:
        """Send one request to one server, and report its outcome to the balancer."""
        ids, rid = episode.recorder.prompt(), uuid.uuid4().hex
        params = self._sampling_params(episode, len(ids), max_new_tokens)
        routed_from = episode.recorder.n_routed if episode.spec.routing else None
        request = asyncio.ensure_future(
            server.engine.generate(ids, params, rid, timeout_s=self._bounds.timeout_s, routed_from=routed_from)
        )
        try:
            generation = await asyncio.shield(request)
        except asyncio.CancelledError:
            await self._abort_request(request, server, rid, episode)
            raise
        except RateLimited:
            raise
        except VolleyError as error:
            if error.transient:
                self._balancer.fail(server, str(error), error.waits_on)
            raise
        self._balancer.succeeded(server, generation.versions[-1].version if generation.versions else None)
        if episode.spec.need.strict:
            try:
                self._check_versions(generation, episode.spec.need)
            except WrongVersion as error:
                self._balancer.fail(server, str(error))  # a probe tells what it has now
                raise
        return generation

    async def _abort_request(
        self, request: asyncio.Future[Generation], server: ServerLoad, rid: str, episode: EpisodeState
    ) -> None:
        """Abort a request; keep the tokens of its answer if this process is stopping."""
        if not self._is_kept():
            request.cancel()
        await _abort(server, rid)
        await asyncio.wait([request], timeout=_ABORT_S)
        request.cancel()
        await asyncio.wait([request])
        if not self._is_kept() or request.cancelled() or request.exception() is not None:
            return
        if len(request.result().output_ids):
            episode.budget.sampled[-1].parts.append(request.result())

    def _check_versions(self, generation: Generation, need: VersionBounds) -> None:
        """Raise WrongVersion if a token is outside the bounds, or was sampled by undone weights."""
        for span in generation.versions:
            version = WeightVersion.parse(span.version)
            late = need.max_step is not None and version.step > need.max_step
            if late or version.step < (need.min_step or 0) or self._balancer.is_undone(version):
                raise WrongVersion(f"tokens of {span.version} but step {need.min_step} was requested")

    def _sampling_params(self, episode: EpisodeState, position: int, max_new_tokens: int) -> dict[str, Any]:
        spec = episode.spec
        return {
            **spec.sampling,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": self._end_ids,
            "sampling_seed": seeding.sampling_seed(spec.seed, spec.ticket, spec.sample_index, position, episode.draw),
        }


def _described(generation: Generation) -> dict[str, str | int]:
    """Return span attributes of an answer."""
    return {
        "gen_ai.usage.output_tokens": len(generation.output_ids),
        "gen_ai.response.finish_reason": generation.finish_reason,
        "volley.cached_tokens": generation.cached_tokens,
        "volley.version": generation.versions[-1].version if generation.versions else "",
    }


async def _abort(server: ServerLoad, rid: str) -> None:
    """Abort a request, best effort within a deadline: the engine continues requests of disconnected clients."""
    with suppress(VolleyError, TimeoutError):
        async with asyncio.timeout(_ABORT_S):
            await server.engine.abort(rid)
