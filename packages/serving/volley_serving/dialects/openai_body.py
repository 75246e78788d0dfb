"""Fields that the bodies of OpenAI's routes have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from volley_serving.dialects.fields import honoured
from volley_serving.dialects.records import Sampling

MAX_TOP_K = 1 << 30
MAX_STOPS = 1024
MAX_TOP_LOGPROBS = 20

type TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """`include_usage` ends a stream with the numbers of tokens; vLLM's `continuous_usage_stats` has no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """Fields of chat and text completions; `fields` checks all others."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=1e3)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    n: int | None = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, raw: Any) -> Any:
        """Return the fields that are not null; a null field counts as absent."""
        return honoured(raw, cls.model_fields)

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or -1,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            skip_special_tokens=bool(self.skip_special_tokens),
        )

    def wants_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)
