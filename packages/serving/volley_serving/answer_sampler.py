"""Sample the answers to a client's request, and decode them while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from services.rollout.api import validation
from services.rollout.api.generation import Receive
from services.rollout.api.routes import RolloutState
from services.rollout.engines.base import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Grammar,
    NewTokens,
    SamplingParams,
    TopTokens,
)
from volley_serving.dialects.decoding import AnswerDecoder
from volley_serving.dialects.events import AnswerStream
from volley_serving.dialects.grammars import AnswerGrammar
from volley_serving.dialects.prompts import Prompt
from volley_serving.dialects.records import Answered, Asked, EchoedPrompt, Piece, Sampled, TopLogprobs, Usage, usage_of
from volley_serving.event_stream import EventBuffer

type Sink = Callable[[int, list[Piece], Sampled | None], None]
_EMPTY = np.empty(0, np.float32)


class AnswerSampler:
    """Sampler of n answers to each prompt of a request.

    Args:
        default_tokens: limit of an answer if the request has none; None for as many tokens as fit.

    Raises InputError for a request that the engine cannot run.
    """

    def __init__(
        self, state: RolloutState, asked: Asked, prompts: Sequence[Prompt], default_tokens: int | None
    ) -> None:
        assert state.tokenizer is not None
        self._state, self._asked, self._tokenizer = state, asked, state.tokenizer
        validation.check_count(len(prompts) * asked.n, state.info)
        self._ids = [validation.check_ids(np.array(one.ids, np.int64), state.info.vocab_size) for one in prompts]
        self._requests = [
            self._request(ids, prompt, i, default_tokens)
            for ids, prompt in zip(self._ids, prompts, strict=True)
            for i in range(asked.n)
        ]
        self._decoders = [AnswerDecoder(state.tokenizer, asked, one.opened) for one in prompts for _ in range(asked.n)]

    async def sample(self, receive: Receive) -> tuple[list[Answered], Usage]:
        """Return the answers, those of each prompt in a row. Raises as `GenerationRunner.run`."""
        answers, usage = await self._run(receive, None)
        if self._asked.echo:
            echoes = [await self._echo(ids, receive) for ids in self._ids]
            answers = [replace(answer, echo=echoes[i // self._asked.n]) for i, answer in enumerate(answers)]
        return answers, usage

    async def stream(self, stream: AnswerStream, put: EventBuffer, receive: Receive) -> None:
        """Put the events of the answers as their tokens are sampled. Raises as `GenerationRunner.run`."""
        begun = False

        def sink(i: int, pieces: list[Piece], sampled: Sampled | None) -> None:
            nonlocal begun
            data = (b"" if begun else stream.begin(sum(map(len, self._ids)))) + stream.add(i, pieces, sampled)
            begun = True
            if data:
                put(data)

        answers, usage = await self._run(receive, sink)
        put(b"".join(stream.finish(i, answer) for i, answer in enumerate(answers)) + stream.end(usage))

    async def _run(self, receive: Receive, sink: Sink | None) -> tuple[list[Answered], Usage]:
        def watch(i: int, new: NewTokens) -> bool:
            decoder = self._decoders[i]
            before = decoder.n_tokens
            pieces = decoder.add(new.output_ids.tolist())
            if sink and (n := decoder.n_tokens - before):
                sink(i, pieces, Sampled(new.output_ids, new.logprobs, top=_top(new.top)).first(n))
            return decoder.stopped

        watched = sink is not None or any(decoder.may_stop for decoder in self._decoders)
        results = await self._results(receive, watch if watched else None)
        answers = list[Answered]()
        for i, (decoder, result) in enumerate(zip(self._decoders, results, strict=True)):
            if not watched:
                decoder.add(result.output_ids.tolist())
            pieces, answer = decoder.end(_sampled(result))
            answers.append(answer)
            if sink:
                sink(i, pieces, None)
        cached = sum(result.cached_tokens for result in results[:: self._asked.n])
        return answers, usage_of([len(ids) for ids in self._ids], answers, cached)

    async def _results(self, receive: Receive, watch: Callable[[int, NewTokens], bool] | None) -> list[GenerateResult]:
        if self._asked.sampling.max_tokens != 0:
            return await self._state.generation.run(self._requests, receive, watch)
        finish = FinishReason("length", length=0)
        return [
            GenerateResult(request.rid, _EMPTY.astype(np.int32), _EMPTY, finish, (), len(request.input_ids), 0)
            for request in self._requests
        ]

    async def _echo(self, ids: np.ndarray, receive: Receive) -> EchoedPrompt:
        if not self._asked.logprobs or len(ids) < 2:
            return EchoedPrompt(ids, _EMPTY)
        scored = await self._state.generation.score(ids, receive, self._asked.top_logprobs)
        return EchoedPrompt(ids, scored.logprobs, _top(scored.top))

    def _request(self, ids: np.ndarray, prompt: Prompt, i: int, default_tokens: int | None) -> GenerateRequest:
        info = self._state.info
        room = max(1, validation.room(info) - len(ids))
        limit = self._asked.sampling.max_tokens
        limit = min(default_tokens or room, room) if limit is None else limit
        request = validation.build(ids, self._sampling(limit, i, prompt.grammar), None, info)
        return replace(request, top_logprobs=self._asked.top_logprobs)

    def _sampling(self, limit: int, i: int, grammar: AnswerGrammar | None) -> SamplingParams:
        wanted = self._asked.sampling
        forced = grammar is not None and "grammar" in self._state.info.options
        ends = () if wanted.ignore_eos else tuple(sorted(self._tokenizer.end_ids))
        stops = validation.check_stops([*wanted.stop_token_ids], self._state.info.vocab_size)
        return SamplingParams(
            max_new_tokens=limit,
            temperature=validation.computable(wanted.temperature),
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            stop_token_ids=(*ends, *stops),
            ignore_eos=wanted.ignore_eos,
            grammar=Grammar(grammar.kind, grammar.text) if grammar and forced else None,
            sampling_seed=None if wanted.seed is None else (wanted.seed + i) % (1 << 64),
        )


def _sampled(result: GenerateResult) -> Sampled:
    finish = result.finish
    return Sampled(result.output_ids, result.logprobs, finish.type, finish.matched, result.versions, _top(result.top))


def _top(top: TopTokens | None) -> TopLogprobs | None:
    return None if top is None else TopLogprobs(*top)
