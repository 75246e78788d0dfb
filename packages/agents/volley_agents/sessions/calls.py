"""Sample the answers of one call: the tokens of its prompt, n samples, and their nodes in the session's tree.

A prompt that continues a node is that node's tokens and the new messages, tokenized after them. Any other prompt is
rendered whole: what the assistant says in it is context, not sampled. Training corrects for the run's sampling, so the
temperature, top_p, top_k and seed that an agent asks for have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.recorder import Recorder
from services.orchestrator.episodes.turn import EpisodeState, TokenBounds, TurnSampler
from services.orchestrator.status import RunStatus
from shared.clients.rollout import Generation
from shared.errors import ContextExceeded, InputError, Unavailable, VolleyError, first_error
from shared.models.chat import ChatTokenizer
from shared.models.continuation import HistoryChanged
from shared.process import offload, tracing
from shared.types import ASSISTANT, MAX_BRANCHES, MAX_TREE_TOKENS
from volley_agents.sessions.answers import RecordedCall
from volley_agents.sessions.failures import CallsUsedUp
from volley_agents.sessions.messages import digest_of, next_digest
from volley_agents.sessions.session import AgentSession, RunningSample
from volley_agents.sessions.tree import ROOT, Node, TreePosition
from volley_serving.dialects.chat import message_of
from volley_serving.dialects.completions import with_ids
from volley_serving.dialects.decoding import answered
from volley_serving.dialects.described import with_tools_written
from volley_serving.dialects.prompts import Prompt, begin_call, ends_open, render, variables_of
from volley_serving.dialects.records import Answered, Asked, Head, Sampled, usage_of


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Ids before the samples, int32 [T], of which the last `n_context` follow the node; `opened` as in `Prompt`."""

    place: TreePosition
    ids: np.ndarray
    n_context: int
    opened: str


class CallSampler:
    """Samples the calls of all sessions. Args: model: name of the model in answers.

    `tokenizer` refuses texts that are longer than the context.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, sampler: TurnSampler, bounds: TokenBounds, status: RunStatus, model: str
    ) -> None:
        self._sampler, self._bounds, self._status = sampler, bounds, status
        self.tokenizer, self.model = tokenizer.within(bounds.context_length), model

    async def read(self, session: AgentSession, read: Callable[[], Asked]) -> Asked:
        """Read a call by `read`, and tokenize a prompt that is text, off the event loop.

        Raises what `read` raises, InputError for fields that cannot be honoured, ContextExceeded.
        """

        def work() -> Asked:
            asked = read()
            _check(asked)
            return with_ids(asked, self.tokenizer)

        with _record_context_limit(session):
            return await offload.tokenizing(work)

    async def sample(self, session: AgentSession, asked: Asked, number: int) -> RecordedCall:
        """Sample the answers of a call. Its span lies in the caller's trace, if that sent one, else in the episode's.

        Raises InputError, ContextExceeded, CallsUsedUp, Unavailable.
        """
        running = await session.running_sample()
        caller, about = tracing.here(), {"volley.session": session.record.id, "volley.call": number}
        with tracing.span("agent call", about, parent=caller or running.place, link=caller and running.place):
            return await self._sample(session, running, asked, number)

    async def _sample(self, session: AgentSession, running: RunningSample, asked: Asked, number: int) -> RecordedCall:
        prompt = await self._locate(session, asked)
        place = prompt.place
        self._check_fits(session, prompt, asked.n)
        session.planned[number] = asked.n, self._added(prompt, asked.n)
        numbers = session.number_nodes(asked.n)
        draws = session.draws.reserve(place.digest, _last_draw(session, prompt), asked.n)
        running.budget.turn = number + 1
        generations = list[Generation]()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._draw(session, running, asked, prompt, draw)) for draw in draws]
        except* VolleyError as errors:
            raise first_error(errors) from None
        else:
            generations = [task.result() for task in tasks]
        finally:
            if not generations:  # an agent that does not wait for long answers gets no other ones
                session.draws.free(place.digest, draws)
        self._status.turn_answered(running.spec.env, number + 1, 0.0)
        answers = [answered(self.tokenizer, asked, self._sampled(one), prompt.opened) for one in generations]
        nodes = [
            self._node(session, prompt, asked, *one) for one in zip(numbers, draws, answers, generations, strict=True)
        ]
        version = generations[0].versions[-1].version if generations[0].versions else None
        usage = usage_of([len(prompt.ids)], answers, generations[0].cached_tokens)
        return RecordedCall(number, Head(self.model, version), answers, usage, nodes)

    async def _locate(self, session: AgentSession, asked: Asked) -> _Prompt:
        """Find the turn that a request continues, and the tokens of its prompt. Raises InputError."""
        if asked.prompts:
            ids = np.array(asked.prompts[0], np.int32)
            if ids.max() >= (size := self.tokenizer.vocab_size):
                raise InputError(f"prompt has token {ids.max()}, but the vocabulary has only {size} tokens")
            place = session.tree.find_ids(ids)
            return _Prompt(place, ids, len(ids) - session.tree.length(place.node), "")
        variables = variables_of(asked, self.tokenizer)
        tokenizer = self.tokenizer.with_variables(variables) if variables else self.tokenizer
        return await self._prompt(session, asked, session.tree.find(asked.messages, asked.tools, variables), tokenizer)

    async def _prompt(
        self, session: AgentSession, asked: Asked, place: TreePosition, tokenizer: ChatTokenizer
    ) -> _Prompt:
        """Tokenize what the request adds. Raises InputError."""
        node = place.node

        def tokenize() -> Prompt | None:
            if node is None:
                return render(asked, self.tokenizer)
            messages, tools = with_tools_written(tokenizer, asked.messages, asked.tools)
            at = len(messages) - (len(asked.messages) - place.n_known)
            try:
                ids = tokenizer.continue_after(node.ids.tolist(), messages[at:], messages[:at], tools)
            except HistoryChanged:
                return None
            if asked.tool_choice == "required":
                call = begin_call(asked, tokenizer)
                return Prompt([*ids, *call.ids], call.opened)
            return Prompt(ids, ends_open(tokenizer, ids))

        with _record_context_limit(session):
            prompt = await offload.tokenizing(tokenize)
        if prompt is None:
            again = place._replace(node=None, n_known=0, reason="template")
            return await self._prompt(session, asked, again, tokenizer)
        ids = np.concatenate([session.tree.ids(node), np.array(prompt.ids, np.int32)])
        return _Prompt(place, ids, len(prompt.ids), prompt.opened)

    def _check_fits(self, session: AgentSession, prompt: _Prompt, n: int) -> None:
        """Raise ContextExceeded or CallsUsedUp."""
        tree, n_tokens = session.tree, len(prompt.ids)
        if self._bounds.room(n_tokens) <= 0:
            session.reached("context")
            raise ContextExceeded.of(self._bounds.context_length - 1, n_tokens, 1)
        n_turns = len(tree.nodes) + sum(turns for turns, _ in session.planned.values())
        n_stored = sum(map(tree.length, tree.leaves())) + sum(tokens for _, tokens in session.planned.values())
        if n_turns + n > MAX_BRANCHES or n_stored + self._added(prompt, n) > MAX_TREE_TOKENS:
            session.reached("turns")
            raise CallsUsedUp(
                f"session {session.record.id} has as many turns as an episode may have",
                f"{MAX_BRANCHES} turns, and {MAX_TREE_TOKENS} tokens in all sequences",
            )

    def _added(self, prompt: _Prompt, n: int) -> int:
        """Most tokens that n samples add to the sequences."""
        return n * (len(prompt.ids) + self._bounds.max_response_length)

    async def _draw(
        self, session: AgentSession, running: RunningSample, asked: Asked, prompt: _Prompt, draw: int
    ) -> Generation:
        """Sample once. An attempt that repeats an earlier one gets that one's sample."""
        drawn, limit = running.budget.drawn, asked.sampling.max_tokens
        key, other = digest_of(prompt.ids.tobytes(), draw, limit), digest_of(prompt.ids.tobytes(), draw)
        used = running.budget.used
        budget = TokenBudget(
            self._bounds.max_attempts,
            used,
            turn=1,
            timer=running.budget.timer,
            sampled=[drawn[key]] if key in drawn else [],
        )
        recorder = Recorder(prompt.ids, session.tree.n_routed(prompt.place.node))
        seed = int.from_bytes(other[:4], "little")  # calls at once may have different prompts of one length
        episode = EpisodeState(running.spec, budget, recorder, session.server_url, max_new_tokens=limit, draw=seed)
        try:
            await self._sampler.turn(episode)
        finally:
            running.budget.used = max(running.budget.used, budget.used)  # one outage of calls at once is one attempt
            running.budget.failures.update(budget.failures)
            session.generate_s += episode.generate_s
        drawn[key] = budget.sampled[0]
        running.budget.n_sampled += budget.n_sampled
        running.budget.progressed()
        session.server_url = episode.server_url
        generation = recorder.sampled_since(len(prompt.ids))
        if not len(generation.output_ids):
            raise Unavailable("the rollout server sampled no token", "send the call again")
        return generation

    def _sampled(self, generation: Generation) -> Sampled:
        ids = generation.output_ids.tolist()
        finish = "stop" if self.tokenizer.is_ended(ids) else "length"
        return Sampled(generation.output_ids, generation.logprobs, finish, versions=generation.versions)

    def _node(
        self,
        session: AgentSession,
        prompt: _Prompt,
        asked: Asked,
        number: int,
        draw: int,
        answer: Answered,
        one: Generation,
    ) -> Node:
        place, sampled, message = prompt.place, answer.sampled, message_of(answer)
        routed, start = one.routed_experts, session.tree.n_routed(place.node)
        if routed is not None:
            routed = routed[: len(prompt.ids) + len(sampled.ids) - start]
        return Node(
            number,
            ROOT if place.node is None else place.node.number,
            draw,
            _role(asked, place),
            prompt.ids[len(prompt.ids) - prompt.n_context :],
            sampled.ids,
            sampled.logprobs,
            sampled.versions,
            sampled.finish,
            next_digest(place.digest, message),
            next_digest(place.digest, message, reasoning=False),
            place.first,
            place.reason,
            routed,
        )


@contextmanager
def _record_context_limit(session: AgentSession) -> Iterator[None]:
    """Note in the session that its context refused a call."""
    try:
        yield
    except ContextExceeded:
        session.reached("context")
        raise


def _check(asked: Asked) -> None:
    """Raise InputError naming a field that a session cannot honour. Any model name means the trained model."""
    wanted = asked.sampling
    refused = {
        "continue_final_message": asked.continues,
        "add_generation_prompt=false": not asked.header,
        "top_logprobs": asked.top_logprobs > 0,
        "response_format": asked.schema is not None,
        "stop_token_ids": bool(wanted.stop_token_ids),
        "ignore_eos": wanted.ignore_eos,
        "echo": asked.echo,
    }
    if names := [name for name, is_asked in refused.items() if is_asked]:
        raise InputError(f"{', '.join(names)} is not supported in a session", "remove it from the request")
    if len(asked.prompts) > 1 or not all(asked.prompts):
        raise InputError("prompt must be one text or one list of token ids", "send a request for each prompt")


def _role(asked: Asked, place: TreePosition) -> str:
    """Role of the text before the sample; that of the sample is kept for what is sampled."""
    role = str(asked.messages[place.n_known]["role"]) if place.n_known < len(asked.messages) else ASSISTANT
    return "user" if role == ASSISTANT else role


def _last_draw(session: AgentSession, prompt: _Prompt) -> int:
    """Return the number of the last recorded sample of this prompt; -1 if there is none."""
    place, n = prompt.place, prompt.n_context
    parent = ROOT if place.node is None else place.node.number
    context = prompt.ids[len(prompt.ids) - n :]
    twins = (node for node in session.tree.nodes.values() if node.parent == parent)
    return max((node.draw for node in twins if np.array_equal(node.context, context)), default=-1)
