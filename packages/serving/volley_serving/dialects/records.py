"""Records between the dialects of clients and the engine: a request, sampled tokens, an answer.

A dialect reads the body of a request into `Asked`, and writes `Answered` as that API's JSON or server-sent events. The
rollout server and the recorder of agents use the same dialects. Nothing here knows HTTP or an engine.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shared.types import VersionSpan

type ToolChoice = Literal["auto", "none", "required"]
type FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling fields of a request. `max_tokens` None asks for as many as fit; `stop` are texts, which may be empty."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of a client, the same for every dialect.

    Attributes:
        messages: conversation as `volley_serving.templates.messages.read_messages` returns it; empty for text
            completions.
        prompts: prompts of text completions, as text or token ids.
        tools: in OpenAI's shape, {"type": "function", "function": {"name", "parameters", …}}.
        tool_name: the function that must be called; only with `tool_choice` "required".
        variables: values for variables of the chat template.
        thinking: False asks the model not to think, True to think; None leaves it to the chat template.
        effort: of the reasoning, a variable of some chat templates.
        continues: the answer continues the last message.
        header: False leaves out the header of the answer.
        n: number of answers for each prompt.
        logprobs: log-probabilities of the sampled tokens are wanted, each with the `top_logprobs` most likely tokens.
        echo: the answer repeats its prompt.
        token_names: tokens of log-probabilities are written as `token_id:ID`, not as text.
        prompt_ids: each choice has the ids of its prompt.
        schema: JSON schema that the answer must follow; {} stands for any JSON object, None for any text.
        include_usage: a stream ends with the numbers of tokens.
    """

    model: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_calls: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    thinking: bool | None = None
    effort: str | None = None
    continues: bool = False
    header: bool = True
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    token_names: bool = False
    prompt_ids: bool = False
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def reads_calls(self) -> bool:
        """True if calls are read from the model's text."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The k most likely tokens at each of n positions: `ids` int32[n, k], `logprobs` float32[n, k], largest first."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens of one answer, or a part of them: `ids` int32[n], `logprobs` float32[n].

    Attributes:
        finish: "stop" for a token that ends the answer, "length" for the limit, "abort" if it was ended from outside.
        matched: the token that ended the answer, if any.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: Literal["stop", "length", "abort"] = "stop"
    matched: int | None = None
    versions: tuple[VersionSpan, ...] = ()
    top: TopLogprobs | None = None

    def first(self, n: int) -> Sampled:
        """Return the first n tokens."""
        spans = tuple(replace(span, end=min(span.end, n)) for span in self.versions if span.start < n)
        top = self.top and TopLogprobs(self.top.ids[:n], self.top.logprobs[:n])
        return replace(self, ids=self.ids[:n], logprobs=self.logprobs[:n], versions=spans, top=top)


@dataclass(frozen=True, slots=True, eq=False)
class EchoedPrompt:
    """Tokens of a prompt that the answer repeats: `ids` int32[n]; `logprobs` float32[n - 1] of all but the first.

    `top` has n - 1 rows. Without log-probabilities wanted, they are empty and None.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a tool in an answer; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Piece of an answer's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """Piece of an answer's content."""

    text: str


type Piece = Reasoning | AnswerContent | Call


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """One answer, as the client reads it.

    Attributes:
        sampled: its tokens, up to the one that completes a stop string.
        stop: the stop string that ended it, if any.
        echo: the prompt, if the answer repeats it.
    """

    sampled: Sampled
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: FinishReason = "stop"
    stop: str | None = None
    echo: EchoedPrompt | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The answer as the pieces of a stream."""
        texts: list[Piece] = [Reasoning(self.reasoning)] if self.reasoning else []
        return [*texts, *([AnswerContent(self.content)] if self.content else []), *self.calls]


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens; those of the prompt are counted once for all answers to it."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """Identity of an answer: `id` without the dialect's prefix, time in seconds, model and weight version."""

    model: str
    version: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def usage_of(prompts: Sequence[int], answers: Sequence[Answered], cached: int = 0) -> Usage:
    """Count tokens. Args: prompts: length of each prompt."""
    return Usage(sum(prompts), sum(len(answer.sampled.ids) for answer in answers), cached)
