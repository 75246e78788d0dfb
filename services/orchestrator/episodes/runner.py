"""Run one episode: model and environment take turns until one of them, or a limit, ends it.

The tokens so far are the whole state of the model's side. So if a server fails, the turn continues on another one, and
a turn that a weight update cut short continues. Only the environment's state can be lost; then the episode restarts
(see `groups`), and repeats the model's turns as long as the environment answers the same. The model's actions are data;
exceptions are infrastructure failures.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from services.orchestrator.episodes.environments import EnvironmentCalls, Environments
from services.orchestrator.episodes.failures import EpisodeTimeout, PromptTooLong
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.episodes.recorder import Recorder
from services.orchestrator.episodes.turn import EpisodeState, SamplingSpec, TokenBounds, TokenBudget, TurnSampler
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening, StepReply
from shared.errors import Unavailable, VolleyError
from shared.models.chat import ChatTokenizer
from shared.outcomes import End, end_of_turn
from shared.process import tracing
from shared.types import MAX_BRANCHES, MAX_MESSAGE, MAX_TREE_TOKENS, Message, Status, Trajectory

_LONG_TEXT = 20_000  # characters; tokenizing more would block the event loop


class Agents(Protocol):
    """Runs the episodes whose turns are calls of an agent (see `sessions`)."""

    async def resume(self, spec: SamplingSpec, budget: TokenBudget) -> Trajectory | str | None:
        """Return what an earlier process left of a sample: its trajectory, or the request id of its episode."""
        ...

    async def run(self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str) -> Trajectory: ...


@dataclass(frozen=True, slots=True)
class _Ended:
    success: bool
    status: Status
    end: End


class EpisodeRunner:
    """Runs episodes; one object serves all of them."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        environments: Environments,
        balancer: Balancer,
        status: RunStatus,
        bounds: TokenBounds,
        agents: Agents | None = None,
        partials: PartialRollouts | None = None,
    ) -> None:
        self._tokenizer, self._balancer, self._bounds, self._agents = tokenizer, balancer, bounds, agents
        partials = partials or PartialRollouts(None)
        self._calls, self._partials, self._status = EnvironmentCalls(environments, status), partials, status
        self._sampler = TurnSampler(balancer, status, tokenizer.end_ids, bounds, lambda: partials.keeps_tokens)

    async def run(self, spec: SamplingSpec, budget: TokenBudget) -> Trajectory:
        """Run one episode; its environment's episode is deleted, unless this process stops and resumes it later.

        Raises:
            PromptTooLong: the first prompt leaves no room to answer.
            VolleyError: the infrastructure failed (see `failures`).
        """
        try:
            async with asyncio.timeout(self._bounds.timeout_s) as budget.timer:
                return await self._run(spec, budget)
        except TimeoutError:
            raise EpisodeTimeout(
                f"an episode of {spec.env}/{spec.split}/{spec.index} took more than {self._bounds.timeout_s:g} s"
            ) from None

    async def _run(self, spec: SamplingSpec, budget: TokenBudget) -> Trajectory:
        started = time.monotonic()
        left = None if self._agents is None else await self._agents.resume(spec, budget)
        left = left or await self._partials.resume(spec, budget, self._sampler.is_usable)
        if isinstance(left, Trajectory):
            return left
        request_id = left or uuid.uuid4().hex
        opening = await self._calls.open(spec, request_id, budget, is_kept=left is not None)
        if opening.agent:
            return await self._run_agent(spec, budget, opening, request_id)
        env_s = time.monotonic() - started
        try:
            episode = EpisodeState(spec, budget, Recorder(await self._prompt(opening)))
            ended, step_s = await self._play(episode, opening, request_id)
        except asyncio.CancelledError:
            await self._partials.save_turn(spec, budget, request_id)
            raise
        finally:
            if not self._partials.keeps(spec):
                await self._calls.delete(opening.episode_id)
        timings = {"env_s": env_s + step_s, "generate_s": episode.generate_s, "total_s": time.monotonic() - started}
        trajectory = episode.recorder.trajectory(
            ticket=spec.ticket,
            sample_index=spec.sample_index,
            attempt=budget.used,
            env=spec.env,
            task=opening.task,
            success=ended.success,
            status=ended.status,
            end=ended.end,
            failures=budget.failures,
            timings=timings,
        )
        trajectory.validate()
        await self._partials.save_finished(spec, trajectory)
        return trajectory

    async def _run_agent(
        self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str
    ) -> Trajectory:
        """Let an agent play. Its episode survives only a stop of this process, so that it continues afterwards."""
        try:
            if self._agents is None:
                raise Unavailable(f"{spec.env} is played by an agent, and this orchestrator records none")
            trajectory = await self._agents.run(spec, budget, opening, request_id)
        except asyncio.CancelledError:
            is_late = budget.timer is not None and budget.timer.expired()
            if is_late or (spec.ticket and not self._partials.is_stopping):  # its group was given up
                await self._calls.delete(opening.episode_id)
            raise
        except VolleyError:
            await self._calls.delete(opening.episode_id)
            raise
        await self._calls.delete(opening.episode_id)
        trajectory.validate()
        return trajectory

    async def environment_ready(self) -> None:
        """Wait until the environment service accepts requests; only that or cancellation ends it."""
        await self._calls.ready()

    async def _play(self, episode: EpisodeState, opening: Opening, request_id: str) -> tuple[_Ended, float]:
        """Play turns until the end; return how it ended, and the seconds spent in the environment."""
        env_s, n_turns, ended = 0.0, 0, None
        while ended is None:
            n_turns += 1
            with tracing.span("turn", {"volley.turn": n_turns}):
                ended, took_s = await self._turn(episode, opening, request_id, n_turns)
            env_s += took_s
        return ended, env_s

    async def _turn(
        self, episode: EpisodeState, opening: Opening, request_id: str, number: int
    ) -> tuple[_Ended | None, float]:
        """Play one turn; return how the episode ended, None if it goes on, and the seconds in the environment."""
        recorder, start = episode.recorder, len(episode.recorder)
        episode.budget.turn = number
        sampled = await self._sampler.turn(episode)
        await self._partials.save_turn(episode.spec, episode.budget, request_id)
        stepped = time.monotonic()
        text = self._tokenizer.message_text(sampled)[:MAX_MESSAGE]
        result = await self._step(episode, opening.episode_id, f"{request_id}-{number}", text)
        env_s = time.monotonic() - stepped
        self._status.turn_answered(episode.spec.env, number, episode.budget.reward)
        episode.budget.reward += result.reward
        cut = self._cut(sampled, len(recorder))
        recorder.end_turn(
            start, result.reward, result.reward_components, [result.fault, "length" if cut == "length" else None]
        )
        if result.terminated:
            status: Status = "truncated" if cut else "completed"
            return _Ended(result.success, status, end_of_turn(result.fault, cut=cut)), env_s
        if result.truncated:
            return _Ended(result.success, "truncated", "turns"), env_s
        if number >= self._bounds.max_turns:
            solved, finish_s = await self._finish(episode, opening, request_id)
            return _Ended(result.success or solved, "truncated", "turns"), env_s + finish_s
        ids = await self._continuation(sampled, result.messages)
        if not self._makes_room(episode, len(ids)):
            solved, finish_s = await self._finish(episode, opening, request_id)
            return _Ended(result.success or solved, "truncated", "context"), env_s + finish_s
        recorder.add_environment(ids, str(result.messages[0]["role"]) if result.messages else "user")
        return None, env_s

    def _makes_room(self, episode: EpisodeState, n_new: int) -> bool:
        """Make room for a turn after `n_new` more tokens, if the oldest turns may be dropped; False if there is none.

        Turns are dropped until a whole answer fits, or only the newest is left.
        """
        recorder, bounds = episode.recorder, self._bounds
        rooms = [bounds.room(length + n_new) for length in recorder.lengths_without_oldest()]
        wanted = min(bounds.max_response_length, rooms[-1])
        n = next(i for i, room in enumerate(rooms) if room >= wanted) if bounds.drops_oldest else 0
        if n and (
            recorder.n_truncations >= MAX_BRANCHES or recorder.n_tree_tokens + bounds.context_length > MAX_TREE_TOKENS
        ):
            n = 0
        if rooms[n] > 0 and n:
            recorder.drop_oldest(n)
            episode.draw += 1
        return rooms[n] > 0

    def _cut(self, sampled: Sequence[int], n_tokens: int) -> Literal["length", "context"] | None:
        """Return the limit that cut a turn short, if any. Args: n_tokens: of the episode, this turn included."""
        if self._tokenizer.is_ended(sampled):
            return None
        if len(sampled) >= self._bounds.max_response_length:
            return "length"
        return "context" if self._bounds.room(n_tokens) <= 0 else None

    async def _prompt(self, opening: Opening) -> list[int]:
        ids = await _tokenized(opening.messages, lambda: self._tokenizer.render_prompt(opening.messages, opening.tools))
        if self._bounds.room(len(ids)) <= 0:
            raise PromptTooLong(
                f"the prompt of {opening.task} has {len(ids)} tokens, the context {self._bounds.context_length}",
                "raise rollout.engine.context_length",
            )
        return ids

    async def _continuation(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return await _tokenized(messages, lambda: self._tokenizer.continue_after(sampled, messages))

    async def _step(self, episode: EpisodeState, episode_id: str, request_id: str, text: str) -> StepReply:
        """Send the model's text; text beyond the service's limit was cut, as it is no failure. Raises EpisodeLost."""
        calls = self._calls
        return await calls.call(
            episode.spec, episode.budget, episode_id, lambda: calls.environments.step(episode_id, request_id, text)
        )

    async def _finish(self, episode: EpisodeState, opening: Opening, request_id: str) -> tuple[bool, float]:
        """Add the final reward of an episode that one of our limits ends, if the environment scores the end.

        Returns True if the task is solved, and the seconds it took. Raises EpisodeLost.
        """
        if not opening.scored_at_end:
            return False, 0.0
        began, episode_id, calls = time.monotonic(), opening.episode_id, self._calls
        finish_id = f"{request_id}-finish"
        found = await calls.call(
            episode.spec, episode.budget, episode_id, lambda: calls.environments.finish(episode_id, finish_id)
        )
        episode.recorder.add_reward(found.reward, found.reward_components)
        return found.success, time.monotonic() - began


async def _tokenized(messages: Sequence[Message], render: Callable[[], list[int]]) -> list[int]:
    if sum(len(str(message.get("content") or "")) for message in messages) > _LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()
