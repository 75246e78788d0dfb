"""Text completions of OpenAI: `POST /v1/completions`, as OpenAI, vLLM and SGLang define it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from shared.errors import InputError, VolleyError
from shared.models.chat import ChatTokenizer
from volley_serving.dialects.chat import DONE, envelope, exact_tokens, token_writer, write_usage
from volley_serving.dialects.errors import openai_error
from volley_serving.dialects.events import event
from volley_serving.dialects.openai_body import MAX_TOP_LOGPROBS, SamplingBody, TokenId
from volley_serving.dialects.records import AnswerContent, Answered, Asked, Head, Piece, Sampled, TopLogprobs, Usage

DEFAULT_TOKENS = 16

type _Ids = Annotated[list[TokenId], Field(fail_fast=True)]


class CompletionBody(SamplingBody, json_schema_extra={"examples": [{"prompt": "2 + 2 =", "max_tokens": 8}]}):
    """`prompt` may be a batch. `logprobs`: number of most likely tokens to return beside each token. With `echo` they
    are returned for the prompt, too, at temperature 1; only then may `max_tokens` be 0. `return_token_ids` adds the ids
    of its prompt to each choice, as vLLM does.
    """

    max_tokens: int | None = Field(None, ge=0)
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    prompt: str | _Ids | Annotated[list[str] | list[_Ids], Field(min_length=1)]


def read(body: CompletionBody) -> Asked:
    """Translate a body. Raises InputError naming what cannot be honoured."""
    batch = isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int)
    prompts: list[Any] = list(body.prompt) if batch else [body.prompt]
    if body.echo and body.stream:
        raise InputError("echo=True is not supported in a stream", "leave out echo or stream")
    if body.max_tokens == 0 and not body.echo:
        raise InputError("max_tokens=0 asks for nothing", "send at least 1, or echo=true")
    return Asked(
        model=body.model,
        prompts=tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts),
        sampling=body.sampling(),
        n=body.n or 1,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        top_logprobs=int(body.logprobs or 0),
        echo=bool(body.echo),
        token_names=bool(body.return_tokens_as_token_ids),
        prompt_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        include_usage=body.wants_usage(),
    )


def with_ids(asked: Asked, tokenizer: ChatTokenizer) -> Asked:
    """Tokenize the prompts that are texts."""
    return replace(asked, prompts=tuple(tuple(tokenizer.encode(p)) if isinstance(p, str) else p for p in asked.prompts))


def write(
    asked: Asked, head: Head, answers: Sequence[Answered], usage: Usage, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Write finished answers, those of each prompt in a row, as the JSON of a `text_completion`."""
    choices = [
        {
            "index": i,
            "text": _echoed(answer, tokenizer) + answer.content,
            "finish_reason": answer.finish_reason,
            "logprobs": _all_logprobs(answer, token_writer(asked, tokenizer)) if asked.logprobs else None,
            **exact_tokens(answer.sampled),
            **({"prompt_token_ids": [*asked.prompts[i // asked.n]]} if asked.prompt_ids else {}),
        }
        for i, answer in enumerate(answers)
    ]
    return {**envelope("text_completion", "cmpl", head), "choices": choices, "usage": write_usage(usage)}


class CompletionStream:
    """Encoder of `text_completion` events. See `AnswerStream`."""

    def __init__(self, asked: Asked, head: Head, tokenizer: ChatTokenizer) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._envelope = envelope("text_completion", "cmpl", head)

    def begin(self, n_prompt: int = 0) -> bytes:
        return b""

    def add(self, i: int, pieces: Sequence[Piece], sampled: Sampled | None = None) -> bytes:
        text, logprobs = "".join(piece.text for piece in pieces if isinstance(piece, AnswerContent)), None
        if self._asked.logprobs and sampled is not None and len(sampled.ids):
            name = token_writer(self._asked, self._tokenizer)
            logprobs = _logprobs(sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.top, name)
        return self._chunk(i, text, logprobs=logprobs) if text or logprobs else b""

    def finish(self, i: int, answer: Answered) -> bytes:
        return self._chunk(i, "", answer.finish_reason, exact=exact_tokens(answer.sampled))

    def end(self, usage: Usage) -> bytes:
        counted = event({**self._envelope, "choices": [], "usage": write_usage(usage)})
        return (counted if self._asked.include_usage else b"") + DONE

    def fail(self, error: VolleyError) -> bytes:
        return event({"error": openai_error(error)}) + DONE

    def _chunk(
        self,
        i: int,
        text: str,
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        exact: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason, **(exact or {})}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._envelope, "choices": [choice], **usage})


def _echoed(answer: Answered, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(answer.echo.ids.tolist()) if answer.echo else ""


def _all_logprobs(answer: Answered, text: Callable[[int], str]) -> dict[str, Any]:
    sampled, echo = answer.sampled, answer.echo
    if echo is None:
        return _logprobs(sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.top, text)
    top = echo.top
    if top is not None and sampled.top is not None:
        ids, logprobs = (np.concatenate(pair) for pair in zip(astuple(top), astuple(sampled.top), strict=True))
        top = TopLogprobs(ids, logprobs)
    logprobs = [None, *echo.logprobs.tolist(), *sampled.logprobs.tolist()]
    return _logprobs([*echo.ids.tolist(), *sampled.ids.tolist()], logprobs, top, text)


def _logprobs(
    ids: Sequence[int], logprobs: Sequence[float | None], top: TopLogprobs | None, text: Callable[[int], str]
) -> dict[str, Any]:
    """Write the rows of tokens: the most likely ones and the token itself. `top` has none for a first token without
    log-probability.
    """
    tokens, unknown = [text(token) for token in ids], sum(logprob is None for logprob in logprobs)
    rows: list[dict[str, float] | None] = [None] * unknown
    for n, own in enumerate(zip(ids[unknown:], logprobs[unknown:], strict=True)):
        others = [] if top is None else zip(top.ids[n].tolist(), top.logprobs[n].tolist(), strict=True)
        rows.append(_by_text(text, [*others, own]))
    return {"tokens": tokens, "token_logprobs": [*logprobs], "top_logprobs": rows, "text_offset": _offsets(tokens)}


def _by_text(text: Callable[[int], str], pairs: Sequence[tuple[int, Any]]) -> dict[str, float]:
    """Return log-probabilities by token text; of tokens with the same text, the first counts."""
    found = dict[str, float]()
    for token, logprob in pairs:
        found.setdefault(text(token), logprob)
    return found


def _offsets(tokens: Sequence[str]) -> list[int]:
    return list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else []
