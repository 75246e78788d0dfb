"""Run one episode: model and environment take turns until one of them, or a limit, ends it.

The tokens so far are the whole state of the model's side. So if a server fails, the turn continues on another one, and
a turn that a weight update cut short continues. Only the environment's state can be lost. Then the episode goes on from
the environment's newest snapshot, or it restarts (see `dispatch`) and repeats the model's turns as long as the
environment answers the same. The model's actions are data; exceptions are infrastructure failures. In a game of several
seats, the environment says which of them answers next (see `seats`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.environments import EnvironmentCalls, Environments
from services.orchestrator.episodes.failures import EpisodeLost, EpisodeTimeout, PromptTooLong
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.episodes.seats import EpisodeEnd, RunningEpisode
from services.orchestrator.episodes.turn import SamplingSpec, TokenBounds, TurnSampler
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening, StepReply
from shared.errors import DecodeError, Unavailable, VolleyError
from shared.models.chat import ChatTokenizer
from shared.models.continuation import HistoryChanged
from shared.outcomes import End, Fault, end_of_turn
from shared.process import tracing
from shared.types import ASSISTANT, MAX_MESSAGE, Message, Status, Trajectory

_TEACHER = "choose another environment, or a teacher without further knowledge"
_LONG_TEXT = 20_000  # characters; tokenizing more would block the event loop


class Agents(Protocol):
    """Runs the episodes whose turns are calls of an agent (see `sessions`)."""

    async def resume(self, spec: SamplingSpec, budget: TokenBudget) -> Trajectory | str | None:
        """Return a sample's trajectory from an earlier process, or the request id of its episode."""
        ...

    async def run(self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str) -> Trajectory: ...


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
        """Run the episode from where an earlier process stopped, if one did."""
        started = time.monotonic()
        resumed = None if self._agents is None else await self._agents.resume(spec, budget)
        resumed = resumed or await self._partials.resume(spec, budget, self._sampler.is_usable)
        if isinstance(resumed, Trajectory):
            return resumed
        request_id = resumed or uuid.uuid4().hex
        opening = await self._calls.open(spec, request_id, budget, is_kept=resumed is not None)
        if opening.agent:
            return await self._run_agent(spec, budget, opening, request_id)
        return await self._run_model(spec, budget, opening, request_id, started)

    async def _run_model(
        self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str, started: float
    ) -> Trajectory:
        """Let the model answer the environment until the episode ends. Args: started: time of the call of `open`."""
        env_s, ended = time.monotonic() - started, None
        episode = RunningEpisode(spec, budget, opening, request_id, env_s, opening.seat)
        try:
            if spec.context is not None and opening.seats:
                raise DecodeError(
                    f"{spec.env} has seats, and a teacher that knows more reads one conversation", _TEACHER
                )
            prompt = await self._prompt(opening)
            if spec.context is not None:
                spec.context.begin(opening.messages, len(prompt), opening.tools)
            episode.sit(prompt, opening.messages)
            ended = await self._run_turns(episode)
        except asyncio.CancelledError:
            await self._partials.save_turn(spec, budget, request_id)
            raise
        finally:
            if not (self._partials.keeps(spec) or (ended is not None and ended.is_closed)):
                await self._calls.delete(episode.opening.episode_id)
        trajectory = episode.trajectory(ended, time.monotonic() - started)
        trajectory.validate()
        if spec.context is None:  # which would be lost; a resumed episode plays its stored turns again
            await self._partials.save_finished(spec, trajectory)
        return trajectory

    async def _run_agent(
        self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str
    ) -> Trajectory:
        """Let an agent play. Its episode survives only a stop of this process, so that it continues afterwards."""
        try:
            if self._agents is None:
                raise Unavailable(f"{spec.env} is played by an agent, and this orchestrator has no recorder")
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

    async def _run_turns(self, episode: RunningEpisode) -> EpisodeEnd:
        number, ended = 0, None
        while ended is None:
            number += 1
            with tracing.span("turn", {"volley.turn": number}):
                ended = await self._turn(episode, number)
        return ended

    async def _turn(self, episode: RunningEpisode, number: int) -> EpisodeEnd | None:
        """Sample an answer, send it to the environment, and record both; None if the episode goes on."""
        budget, conversation = episode.budget, episode.present
        recorder, start = conversation.recorder, len(conversation.recorder)
        budget.turn = number
        sampled = conversation.sampled = await self._sampler.turn(conversation.sampling)
        await self._partials.save_turn(episode.spec, budget, episode.request_id)
        text = self._tokenizer.message_text(sampled)[:MAX_MESSAGE]
        result = await self._step(episode, number, text)
        self._status.turn_answered(episode.spec.env, number, budget.reward)
        budget.reward += result.reward
        if episode.spec.context is not None:
            episode.spec.context.answered(text, result.hints)
        cut = self._cut(sampled, len(recorder))
        faults: list[Fault | None] = [result.fault, "length" if cut == "length" else None]
        recorder.end_turn(start, result.reward, result.reward_components, faults)
        if result.terminated or result.truncated:
            success = episode.end(result)
            status: Status = "completed" if result.terminated and not cut else "truncated"
            end: End = end_of_turn(result.fault, cut=cut) if result.terminated else "turns"
            return EpisodeEnd(success, status, end, result.closed)
        if number >= self._bounds.max_turns:
            return EpisodeEnd(await self._finish(episode) or result.success, "truncated", "turns")
        conversation.messages.append({"role": ASSISTANT, "content": text})
        episode.seat = episode.next_seat(result)
        if not await self._continue(episode, result.messages):
            return EpisodeEnd(await self._finish(episode) or result.success, "truncated", "context")
        return None

    async def _continue(self, episode: RunningEpisode, messages: Sequence[Message]) -> bool:
        """Record the environment's messages for the next seat; False if they and a turn do not fit the context."""
        tools = episode.opening.tools
        if episode.seat not in episode.seats:
            ids = await _tokenized(messages, lambda: self._tokenizer.render_prompt(messages, tools))
            if self._bounds.room(len(ids)) <= 0 or episode.is_full(self._bounds.context_length):
                return False
            episode.sit(ids, messages)
            return True
        known, sampled = episode.present.messages, episode.present.sampled
        try:
            ids = await _tokenized(
                [*known, *messages], lambda: self._tokenizer.continue_after(sampled, messages, known, tools)
            )
        except HistoryChanged:
            known.extend(messages)
            return await self._continue_rendered(episode)
        known.extend(messages)
        if self._make_room(episode, len(ids)):
            role = str(messages[0]["role"]) if messages else "user"
            episode.present.recorder.add_environment(ids, role)
            return True
        return False

    async def _continue_rendered(self, episode: RunningEpisode) -> bool:
        """Continue in another sequence, as the chat template changes earlier messages; False if it does not fit."""
        conversation, tools = episode.present, episode.opening.tools
        messages = conversation.messages
        ids = await _tokenized(messages, lambda: self._tokenizer.render_prompt(messages, tools))
        if self._bounds.room(len(ids)) <= 0 or episode.is_full(self._bounds.context_length):
            return False
        conversation.recorder.start_over(ids)
        if episode.spec.context is not None:
            episode.spec.context.prompts.append((tuple(messages), len(ids)))
        conversation.sampling.draw += 1
        return True

    def _make_room(self, episode: RunningEpisode, n_new: int) -> bool:
        """Drop the oldest turns, if allowed, so that a turn fits after `n_new` more tokens; False if it cannot fit.

        Turns are dropped until a whole answer fits, or only the newest is left.
        """
        recorder, bounds = episode.present.recorder, self._bounds
        rooms = [bounds.room(length + n_new) for length in recorder.lengths_without_oldest()]
        wanted = min(bounds.max_response_length, rooms[-1])
        n = next(i for i, room in enumerate(rooms) if room >= wanted) if bounds.drops_oldest else 0
        if n and episode.is_full(bounds.context_length):
            n = 0
        if rooms[n] > 0 and n:
            recorder.drop_oldest(n)
            if episode.spec.context is not None:
                episode.spec.context.prompts.append(episode.spec.context.prompts[-1])
            episode.present.sampling.draw += 1
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

    async def _step(self, episode: RunningEpisode, number: int, text: str) -> StepReply:
        """Send the model's text, cut to the service's limit: a long answer is not a failure. Raises EpisodeLost."""
        step, request_id = self._calls.environments.step, f"{episode.request_id}-{number}"
        return await self._call(episode, lambda id_: step(id_, request_id, text))

    async def _finish(self, episode: RunningEpisode) -> bool:
        """Add the final reward if one of our limits ended the episode and the environment scores it.

        Returns True if the task is solved. Raises EpisodeLost.
        """
        if not episode.opening.scored_at_end or episode.opening.seats:
            return False
        finish, request_id = self._calls.environments.finish, f"{episode.request_id}-finish"
        found = await self._call(episode, lambda id_: finish(id_, request_id))
        episode.present.recorder.add_reward(found.reward, found.reward_components)
        if episode.spec.context is not None:
            episode.spec.context.hints.update(found.hints)
        return found.success

    async def _call(self, episode: RunningEpisode, call: Callable[[str], Awaitable[StepReply]]) -> StepReply:
        """Call the environment service about the episode's id, and add the time to the episode's.

        A lost episode goes on in another one from the newest snapshot. Raises EpisodeLost if there is none.
        """
        spec, budget, started_at = episode.spec, episode.budget, time.monotonic()
        while True:
            id_ = episode.opening.episode_id
            try:
                reply = await self._calls.call(spec, budget, id_, partial(call, id_))
                break
            except EpisodeLost as error:
                if episode.snapshot is None:
                    raise
                budget.count_failure(error)
                opening = await self._calls.open(spec, uuid.uuid4().hex, budget, snapshot=episode.snapshot)
                episode.opening = replace(episode.opening, episode_id=opening.episode_id)
        episode.snapshot = reply.snapshot if episode.opening.restorable else None
        episode.env_s += time.monotonic() - started_at
        return reply


async def _tokenized(messages: Sequence[Message], render: Callable[[], list[int]]) -> list[int]:
    if sum(len(str(message.get("content") or "")) for message in messages) > _LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()
