"""Answer SGLang's /generate: run the requests of a body, end them at stop strings, write whole answers or events.

An event of a stream holds everything sampled so far, as SGLang's do. With msgpack, ids and log-probabilities are
arrays and there is no text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from services.rollout.api.generate import Rows, TextOf, rows, sampled, scored_meta
from services.rollout.api.generation import Receive
from services.rollout.api.routes import RolloutState
from services.rollout.engines.base import FinishReason, GenerateResult, NewTokens, ScoredTokens, TopTokens
from shared.errors import VolleyError
from shared.models.chat import ChatTokenizer
from shared.models.token_decoder import TokenDecoder, held_back
from shared.web.problems import sglang_error
from volley_serving.event_stream import EventBuffer
from volley_serving.sglang.generate_body import AskedPrompt, GenerateBody

END = b"data: [DONE]\n\n"
_MOST_UNREAD = 2**20  # bytes of events that wait for the client


class AnswerText:
    """Text of an answer while its tokens arrive. It ends at the first stop string.

    Args:
        ends: tokens that end an answer, which are no text at its end.

    Attributes:
        n_tokens: tokens up to the end.
        matched: the stop string that was found.
    """

    def __init__(self, tokenizer: ChatTokenizer, asked: AskedPrompt, ends: frozenset[int]) -> None:
        self._tokenizer, self._asked, self._ends = tokenizer, asked, ends
        self._decoder = TokenDecoder(tokenizer, skip_special=asked.skips_special)
        self._longest = max(map(len, asked.stop), default=0)
        self._text, self._waiting = "", list[int]()
        self.n_tokens = 0
        self.matched: str | None = None

    def add(self, ids: Sequence[int]) -> bool:
        """Read more tokens. Returns whether the answer has ended."""
        for part in ([token] for token in ids) if self._asked.stop else [[*ids]]:
            if self.matched is not None:
                break
            self.n_tokens += len(part)
            part = [*self._waiting, *part]
            n = len(part) - (bool(part) and part[-1] in self._ends)
            self._waiting = part[n:]
            self._take(self._decoder.add(part[:n]))
        return self.matched is not None

    def so_far(self) -> str:
        """Return the text that is certain."""
        return self._text[: len(self._text) - held_back(self._text, self._asked.stop)]

    def end(self, ids: Sequence[int], finish: FinishReason) -> str:
        """Return the whole text of an answer of these tokens, all of which have been read."""
        if self.matched is None:
            trimmed = finish.type == "stop" and not self._asked.keeps_stop
            self._take(self._decoder.add([] if trimmed else self._waiting, last=True))
        if self.matched is not None and self._asked.keeps_stop:
            return self._tokenizer.decode(ids[: self.n_tokens], skip_special=self._asked.skips_special)
        return self._text

    def _take(self, text: str) -> None:
        begin = max(0, len(self._text) - self._longest)
        self._text += text
        found = [(at, stop) for stop in self._asked.stop if (at := self._text.find(stop, begin)) >= 0]
        if found:
            at, self.matched = min(found)
            self._text = self._text[:at]


class _Draft:
    """One answer while it is sampled, for a stream."""

    def __init__(self, asked: AskedPrompt, text: AnswerText | None) -> None:
        self.asked, self.text = asked, text
        self.ids, self.logprobs, self.tops = list[int](), list[float](), list[TopTokens]()
        self.version: str | None = None
        self._told = 0

    def add(self, new: NewTokens) -> bool:
        """Read more tokens. Returns whether the answer has ended."""
        if self.text is not None and self.text.matched is not None:
            return True
        stopped = self.text is not None and self.text.add(new.output_ids.tolist())
        self.ids += new.output_ids.tolist()
        self.logprobs += new.logprobs.tolist()
        self.tops += [] if new.top is None else [new.top]
        self.version = new.version or self.version
        return stopped

    def is_due(self) -> bool:
        """Return whether enough tokens have come for the next event."""
        if len(self.ids) - self._told < self.asked.interval:
            return False
        self._told = len(self.ids)
        return True


class AnswerGenerator:
    """Generator of the answers to one body."""

    def __init__(self, state: RolloutState, body: GenerateBody, *, arrays: bool) -> None:
        self._state, self._body, self._arrays = state, body, arrays
        self._text_of = state.tokenizer.token if state.tokenizer else None
        self._texts = [self._text(one) for one in body.prompts]
        self._scores = dict[int, ScoredTokens]()

    async def answer(self, receive: Receive) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the answer, or the list of them for a batch. Raises as `GenerationRunner.run`."""
        stops = any(one.stop for one in self._body.prompts)
        answers = await self._run(receive, self._ends_text if stops else None)
        return answers if self._body.is_batch else answers[0]

    async def stream(self, put: EventBuffer, receive: Receive) -> None:
        """Put an event after each step, then one for each whole answer. Raises as `GenerationRunner.run`.

        Each event repeats those before, so a client that reads slowly misses some.
        """
        drafts = [_Draft(one, text) for one, text in zip(self._body.prompts, self._texts, strict=True)]

        def watch(i: int, new: NewTokens) -> bool:
            stopped = drafts[i].add(new)
            if not stopped and put.n_bytes < _MOST_UNREAD and drafts[i].is_due():
                put(self._event(i, self._unfinished(i, drafts[i])))
            return stopped

        answers = await self._run(receive, watch)
        put(b"".join(self._event(i, answer) for i, answer in enumerate(answers)) + END)

    def _event(self, i: int, answer: Mapping[str, Any]) -> bytes:
        index = {"index": i} if self._body.is_batch else {}
        return b"data: " + orjson.dumps({**answer, **index}) + b"\n\n"

    def _ends_text(self, i: int, new: NewTokens) -> bool:
        text = self._texts[i]
        return text is not None and text.add(new.output_ids.tolist())

    def _text(self, asked: AskedPrompt) -> AnswerText | None:
        """Return the reader of an answer's text; None if no text is wanted."""
        if self._state.tokenizer is None or asked.request is None or (self._arrays and not asked.stop):
            return None
        sampling = asked.request.sampling
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._state.info.eos_token_ids)}
        return AnswerText(self._state.tokenizer, asked, frozenset(ends))

    async def _run(self, receive: Receive, watch: Callable[[int, NewTokens], bool] | None) -> list[dict[str, Any]]:
        prompts = self._body.prompts
        await self._score(receive)
        sampled = [i for i, one in enumerate(prompts) if one.request is not None]
        requests = [request for one in prompts if (request := one.request) is not None]
        watched = None if watch is None else lambda k, new: watch(sampled[k], new)
        results = await self._state.generation.run(requests, receive, watched) if requests else []
        by_prompt = dict(zip(sampled, results, strict=True))
        return [
            self._sampled(i, by_prompt[i], watched=watch is not None) if i in by_prompt else self._scored(i)
            for i in range(len(prompts))
        ]

    async def _score(self, receive: Receive) -> None:
        """Score the prompts whose tokens are listed, each once."""
        known = dict[int, ScoredTokens]()
        for i, one in enumerate(self._body.prompts):
            if one.scored_from is None or one.scored_from >= len(one.ids) - 1:
                continue
            if id(one.ids) not in known:
                known[id(one.ids)] = await self._state.generation.score(one.ids, receive, one.top_logprobs)
            self._scores[i] = known[id(one.ids)]

    def _sampled(self, i: int, result: GenerateResult, *, watched: bool) -> dict[str, Any]:
        asked, text = self._body.prompts[i], self._texts[i]
        written, stop = None, None
        if text is not None:
            if not watched:
                text.add(result.output_ids.tolist())
            written, stop = text.end(result.output_ids.tolist(), result.finish), text.matched
            result = _first(result, text.n_tokens) if stop is not None else result
        found = answer(result, arrays=self._arrays, logprobs=asked.logprobs)
        meta: dict[str, Any] = found["meta_info"]
        if stop is not None:
            meta["finish_reason"] = {"type": "stop", "matched": stop}
        if not self._arrays:
            meta |= self._lists(i, result.output_ids.tolist(), result.logprobs.tolist(), result.top)
            found = {**({} if written is None else {"text": written}), **found}
        elif asked.scored_from is not None or asked.top_logprobs:
            meta |= self._lists(i, result.output_ids.tolist(), result.logprobs.tolist(), result.top)
            meta["output_token_logprobs"] = result.logprobs
        return found | self._prompt_ids(asked)

    def _unfinished(self, i: int, draft: _Draft) -> dict[str, Any]:
        top = TopTokens(*map(np.concatenate, zip(*draft.tops, strict=True))) if draft.tops else None
        assert draft.asked.request is not None
        meta = {
            "id": draft.asked.request.rid,
            "finish_reason": None,
            "prompt_tokens": len(draft.asked.ids),
            "completion_tokens": len(draft.ids),
            "weight_version": draft.version,
            **self._lists(i, draft.ids, draft.logprobs, top),
        }
        text = {} if draft.text is None else {"text": draft.text.so_far()}
        return {**text, "output_ids": draft.ids, "meta_info": meta} | self._prompt_ids(draft.asked)

    def _scored(self, i: int) -> dict[str, Any]:
        """Write the answer to a request that samples nothing."""
        asked = self._body.prompts[i]
        meta = scored_meta(asked.ids, self._scores.get(i), self._lists(i, [], [], None))
        text = {} if self._arrays or self._text_of is None else {"text": ""}
        return {**text, "output_ids": [], "meta_info": meta} | self._prompt_ids(asked)

    def _lists(self, i: int, ids: list[int], logprobs: list[float], top: TopTokens | None) -> dict[str, Any]:
        """Return the lists of log-probabilities that prompt `i` asks for, as SGLang's rows."""
        asked = self._body.prompts[i]
        if not asked.logprobs:
            return {}
        text_of = self._text_of if asked.texts else None
        found: dict[str, Any] = {"output_token_logprobs": rows(logprobs, ids, text_of)}
        if asked.top_logprobs:
            found["output_top_logprobs"] = _top_rows(top, text_of)
        if asked.scored_from is None:
            return found
        scored, start = self._scores.get(i), asked.scored_from
        known = [] if scored is None else scored.logprobs[start:].tolist()
        found["input_token_logprobs"] = rows([None, *known], asked.ids[start:].tolist(), text_of)
        if asked.top_logprobs:
            tops = [] if scored is None else _top_rows(scored.top, text_of)[start:]
            found["input_top_logprobs"] = [None, *tops]
        return found

    def _prompt_ids(self, asked: AskedPrompt) -> dict[str, Any]:
        if not asked.echoes_ids:
            return {}
        return {"prompt_token_ids": asked.ids if self._arrays else asked.ids.tolist()}


def fail(error: VolleyError) -> bytes:
    """Write the last events of a stream that an error ended."""
    return b"data: " + orjson.dumps({"error": sglang_error(error)}) + b"\n\n" + END


def answer(result: GenerateResult, *, arrays: bool, logprobs: bool = True) -> dict[str, Any]:
    """Return SGLang's answer to /generate, with arrays or, for JSON, with lists and rows."""
    found = sampled(result, logprobs=logprobs)
    if arrays:
        return found
    meta: dict[str, Any] = found["meta_info"]
    found["output_ids"] = ids = result.output_ids.tolist()
    if logprobs:
        meta["output_token_logprobs"] = rows(result.logprobs.tolist(), ids)
    if result.routed_experts is not None:
        meta["routed_experts"] = _as_base64(result.routed_experts)
    return found


def _first(result: GenerateResult, n: int) -> GenerateResult:
    """Return the first n tokens of a result."""
    versions = tuple(replace(span, end=min(span.end, n)) for span in result.versions if span.start < n)
    top = result.top and TopTokens(result.top.ids[:n], result.top.logprobs[:n])
    return replace(result, output_ids=result.output_ids[:n], logprobs=result.logprobs[:n], versions=versions, top=top)


def _top_rows(top: TopTokens | None, text_of: TextOf | None) -> list[Rows]:
    if top is None:
        return []
    return [rows(p, t, text_of) for p, t in zip(top.logprobs.tolist(), top.ids.tolist(), strict=True)]


def _as_base64(experts: np.ndarray) -> str:
    """Write experts [n, L, k] as SGLang does: little-endian int32 as base64, without the shape."""
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()
