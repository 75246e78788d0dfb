"""Text completions of OpenAI: `POST /v1/completions`, as OpenAI, vLLM and SGLang define it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from shared.dialects.chat import envelope, exact_tokens, write_usage
from shared.dialects.openai_body import SamplingBody, TokenId
from shared.dialects.records import Answered, Asked, Head, Sampled, Usage
from shared.models.chat import ChatTokenizer

DEFAULT_TOKENS = 16


class CompletionBody(SamplingBody, json_schema_extra={"examples": [{"prompt": "2 + 2 =", "max_tokens": 8}]}):
    """`logprobs`: 0, 1 or true for the log-probabilities of the sampled tokens; there are none of others."""

    logprobs: bool | Annotated[int, Field(ge=0, le=1)] | None = None
    prompt: str | Annotated[list[TokenId], Field(fail_fast=True)]


def read(body: CompletionBody) -> Asked:
    """Translate a body."""
    return Asked(
        model=body.model,
        prompts=(body.prompt if isinstance(body.prompt, str) else tuple(body.prompt),),
        sampling=body.sampling(),
        n=body.n or 1,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        stream=bool(body.stream),
        include_usage=body.wants_usage(),
    )


def write(
    asked: Asked, head: Head, answers: Sequence[Answered], usage: Usage, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Write finished answers, those of each prompt in a row, as the JSON of a `text_completion`."""
    choices = [
        {
            "index": i,
            "text": answer.content,
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer.sampled, tokenizer) if asked.logprobs else None,
            **exact_tokens(answer.sampled),
        }
        for i, answer in enumerate(answers)
    ]
    return {**envelope("text_completion", "cmpl", head), "choices": choices, "usage": write_usage(usage)}


def _logprobs(sampled: Sampled, tokenizer: ChatTokenizer) -> dict[str, Any]:
    tokens = [tokenizer.token(t) for t in sampled.ids.tolist()]
    return {"tokens": tokens, "token_logprobs": sampled.logprobs.tolist(), "top_logprobs": None}
